"""Stores artifacts in a directory; an upload that was broken off goes on where it ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from urllib.parse import quote

from otel_ddp.agent.artifacts.sink import CannotStore


class DirectorySink:
    """One directory, which several agents may share."""

    def __init__(self, directory: Path, agent: str) -> None:
        """*agent*: a word that no other agent has, and the next one of this node has again."""
        self._directory = directory
        self._agent = agent

    def size(self, key: str) -> int | None:
        """The size of a whole object; None if there is none."""
        try:
            return (self._directory / key).stat().st_size
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CannotStore(_why(error)) from None

    def upload(self, key: str) -> DirectoryUpload:
        """Begin an object, or go on with it."""
        final = self._directory / key
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            return DirectoryUpload(final, final.with_name(f".{final.name}.{self._agent}.part"))
        except OSError as error:
            raise CannotStore(_why(error)) from None

    def uri(self, key: str) -> str:
        """Its address."""
        return f"file://{quote(os.fsencode(self._directory / key))}"


class DirectoryUpload:
    """One file, under another name until it is whole."""

    def __init__(self, final: Path, part: Path) -> None:
        self._final, self._part = final, part
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = os.open(part, flags, 0o666)
        if not self._is_ours():
            self.leave()
            raise CannotStore("another agent stores it at this moment")
        self.written = os.fstat(self._fd).st_size

    def _is_ours(self) -> bool:
        # Agents of two containers may have one host name and one directory, and so one part.
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The other one may have given it its final name since it was opened here.
            return os.path.samestat(os.fstat(self._fd), os.stat(self._part, follow_symlinks=False))
        except (BlockingIOError, FileNotFoundError):
            return False
        except OSError:
            return True  # a file system without locks

    def holds(self, at: int, chunk: bytes) -> bool:
        """Whether an earlier attempt left these: a disk may have lost its last bytes."""
        try:
            return os.pread(self._fd, len(chunk), at) == chunk
        except OSError as error:
            raise CannotStore(_why(error)) from None

    def write(self, chunk: bytes) -> None:
        """Add bytes."""
        left = memoryview(chunk)
        try:
            while left:
                left = left[os.write(self._fd, left) :]
        except OSError as error:
            raise CannotStore(_why(error)) from None

    def commit(self) -> None:
        """Give the file its final name, once the disk has all of it."""
        try:
            os.fsync(self._fd)
            os.replace(self._part, self._final)
        except OSError as error:
            raise CannotStore(_why(error)) from None
        finally:
            self.leave()

    def leave(self) -> None:
        """Stop here, and keep what was written."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def discard(self) -> None:
        """Remove what was written."""
        self.leave()
        with contextlib.suppress(OSError):
            self._part.unlink()


def _why(error: OSError) -> str:
    return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)
