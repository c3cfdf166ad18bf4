"""Opens the files of an artifact, only where the agent may read them, by no link of another user.

SECURITY.md says who may make the agent read what.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from hashlib import blake2s
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

MOST_FILES = 100_000
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_LOOK = os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW
_MOST_LINKS = 40


class CannotRead(Exception):
    """The text says why."""

    def __init__(self, why: str, *, again: bool = False) -> None:
        """*again*: whether it may be readable later."""
        super().__init__(why)
        self.again = again


class File(NamedTuple):
    """A file, or a link within a directory, as it is found."""

    name: bytes
    """Its path within the directory; empty if the artifact is one file."""
    size: int
    mtime_ns: int
    inode: int
    link: bytes | None
    """Where a link leads."""


def path_of(uri: str) -> bytes | None:
    """The path that an address stands for; None if it lies elsewhere."""
    return unquote_to_bytes(uri[len("file://") :]) if uri.startswith("file:///") else None


@contextmanager
def opened(path: bytes, roots: Collection[str] | None) -> Iterator[int]:
    """The file or directory, open. *roots*: what may be read lies below these; None: anywhere."""
    try:
        # Before anything is opened: nothing is told of what lies elsewhere.
        _check_below(os.path.realpath(path), roots)
        found = _found(path)
        try:
            # The same file, whatever has its name by now.
            there = b"/proc/self/fd/%d" % found
            _check_below(os.readlink(there), roots)
            fd = os.open(there, _OPEN & ~os.O_NOFOLLOW)
        finally:
            os.close(found)
    except (OSError, ValueError) as error:
        raise cannot(error) from None
    try:
        yield fd
    finally:
        os.close(fd)


def _check_below(path: bytes, roots: Collection[str] | None) -> None:
    if roots is not None and not any(_is_below(path, root) for root in roots):
        below = f"it lies not below {':'.join(roots)}" if roots else "none is named"
        raise CannotRead(
            f"the agent of the platform may not read it: {below} (OTEL_DDP_ARTIFACT_ROOTS)"
        )


def _is_below(path: bytes, root: str) -> bool:
    top = os.path.realpath(os.fsencode(root))
    return path == top or path.startswith(top.rstrip(b"/") + b"/")


def _found(path: bytes) -> int:
    """A descriptor of what a path leads to, part by part, and not yet for reading."""
    here, left, links = os.open(b"/", _LOOK), path.split(b"/")[::-1], 0
    try:
        while left:
            step = _step(left.pop() or b".", here)
            if isinstance(step, bytes):
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, "too many links lead to it")
                left += step.split(b"/")[::-1]
                step = os.open(b"/" if step.startswith(b"/") else b".", _LOOK, dir_fd=here)
            os.close(here)
            here = step
    except BaseException:
        os.close(here)
        raise
    return here


def _step(part: bytes, here: int) -> int | bytes:
    """What a part of a path is: a descriptor of it, or where a link leads."""
    fd = os.open(part, _LOOK, dir_fd=here)
    found = os.fstat(fd)
    if not stat.S_ISLNK(found.st_mode):
        return fd
    try:
        if found.st_uid not in (0, os.geteuid()):
            # Who may write where it lies could have any file of ours read and stored.
            raise CannotRead(f"its path has a link of user {found.st_uid}, which is not followed")
        return os.readlink(b"", dir_fd=fd)
    finally:
        os.close(fd)


def cannot(error: OSError | ValueError) -> CannotRead:
    """What the system's error means for an artifact."""
    if isinstance(error, PermissionError):
        return CannotRead("the agent's user may not read it")
    if isinstance(error, FileNotFoundError):
        return CannotRead("the agent sees no such file: is it in another container?", again=True)
    why = error.strerror if isinstance(error, OSError) else str(error)
    return CannotRead(f"it cannot be read: {why}", again=True)


def listed(top: int) -> list[File]:
    """All files of what is open, by their names; one file has an empty name."""
    found = os.fstat(top)
    if stat.S_ISREG(found.st_mode):
        return [_file(b"", found)]
    if not stat.S_ISDIR(found.st_mode):
        raise CannotRead("it is neither a file nor a directory")
    files: list[File] = []
    try:
        for folder, folders, names, fd in os.fwalk(b".", dir_fd=top, onerror=_raise):
            if len(files) + len(names) > MOST_FILES:
                raise CannotRead(f"there are more than {MOST_FILES} files in it")
            for name in (*names, *folders):
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                where = os.path.normpath(os.path.join(folder, name))
                if stat.S_ISLNK(found.st_mode):
                    files.append(_file(where, found, os.readlink(name, dir_fd=fd)))
                elif stat.S_ISREG(found.st_mode):
                    files.append(_file(where, found))
                elif not stat.S_ISDIR(found.st_mode):
                    raise CannotRead("there is something in it that is neither file nor directory")
    except OSError as error:
        raise cannot(error) from None
    return sorted(files)


def _raise(error: OSError) -> None:
    raise error


def _file(name: bytes, found: os.stat_result, link: bytes | None = None) -> File:
    return File(name, found.st_size, found.st_mtime_ns, found.st_ino, link)


def signature(files: Collection[File]) -> bytes:
    """Another one, as soon as a file of them was written to, replaced, added or removed."""
    return blake2s(repr([tuple(each) for each in files]).encode()).digest()


@contextmanager
def file_within(top: int, name: bytes) -> Iterator[int]:
    """A file of an open directory, itself open; no part of its name may be a link."""
    fd = os.dup(top)
    try:
        for part in name.split(b"/") if name else ():
            inner = os.open(part, _OPEN, dir_fd=fd)
            os.close(fd)
            fd = inner
        if not name:
            os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)
