"""Opens a spool's directory: private to this user, and locked for one agent.

A lock on the file `lock` keeps a directory for one agent. An agent that finds it locked uses the
next one of the same name, `-2` and so on. Where a file system has no locks, the name alone keeps
agents apart.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from otel_ddp.agent.export.spool_files import LOCK
from otel_ddp.journal import locks

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
# More living agents of one name and place than this mean a file system whose locks do not work.
_MOST_OF_A_NAME = 64


class SpoolDirectory:
    """Where a spool's files are. Not locked against threads: the spool does that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        """The directory in use, which may be the next one of the same name."""
        self._wanted = path
        self._lock_file: int | None = None
        self.in_use = False
        """Whether it is in use for good; then another directory is not tried any more."""

    @contextlib.contextmanager
    def opened(self, make: bool = False) -> Iterator[int]:
        """A descriptor of the directory, certainly ours; FileNotFoundError where there is none."""
        # Opened anew each time: since the last time it may have been removed or replaced.
        with contextlib.ExitStack() as stack:
            for number in range(2, _MOST_OF_A_NAME + 2):
                if make:
                    self._make()
                descriptor = self._open(stack)
                if self._lock(descriptor):
                    yield descriptor
                    return
                if self.in_use:
                    break
                self.path = self._wanted.with_name(f"{self._wanted.name}-{number}")
            raise BlockingIOError(errno.EAGAIN, "another agent uses it")

    def _make(self) -> None:
        """Make the directory and what is missing above it, closed to other users."""
        missing = []
        for path in (self.path, *self.path.parents):
            if os.path.lexists(path):
                break
            missing.append(path)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
                os.chmod(path, 0o700)  # the umask may have removed bits

    def _open(self, stack: contextlib.ExitStack) -> int:
        path, above = self.path, None
        if path.parent.name == f"otel_ddp-{os.geteuid()}":
            # Ours is the directory above it, in one where every user may write: another user may
            # have made it first.
            above = _open_private(path.parent, None, "the directory above it ")
            stack.callback(os.close, above)
            path = Path(path.name)
        descriptor = _open_private(path, above)
        stack.callback(os.close, descriptor)
        return descriptor

    def _lock(self, directory: int) -> bool:
        """Lock the directory unless we hold its lock already; False where another agent does."""
        # Compared without opening it: closing any descriptor of it would give the lock back.
        if self._lock_file is not None:
            with contextlib.suppress(FileNotFoundError):
                there = os.stat(LOCK, dir_fd=directory, follow_symlinks=False)
                if os.path.samestat(there, os.fstat(self._lock_file)):
                    return True
        descriptor = os.open(LOCK, _LOCK_FILE, 0o600, dir_fd=directory)
        try:
            locks.acquire(descriptor)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                os.close(descriptor)
                return False
            # Any other error: this file system has no locks.
        if self._lock_file is not None:
            os.close(self._lock_file)
        self._lock_file = descriptor
        return True


def _open_private(path: Path, above: int | None, subject: str = "") -> int:
    """Open a directory if it is ours; no link is followed."""
    descriptor = os.open(path, _DIRECTORY, dir_fd=above)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise PermissionError(1, f"{subject}belongs to another user")
        if found.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
