"""Opens the files of an artifact, only where the agent may read them, without following links.

SECURITY.md says who may make the agent read what.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from hashlib import blake2s
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

MOST_FILES = 100_000
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


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
        real = os.path.realpath(path)
        if roots is not None and not any(_is_below(real, root) for root in roots):
            below = f"it lies not below {':'.join(roots)}" if roots else "none is named"
            raise CannotRead(
                f"the agent of the platform may not read it: {below} (OTEL_DDP_ARTIFACT_ROOTS)"
            )
        fd = _open_without_links(real)
    except (OSError, ValueError) as error:
        raise cannot(error) from None
    try:
        yield fd
    finally:
        os.close(fd)


def _is_below(path: bytes, root: str) -> bool:
    top = os.path.realpath(os.fsencode(root))
    return path == top or path.startswith(top.rstrip(b"/") + b"/")


def _open_without_links(real: bytes) -> int:
    """Opens one part after the other: what has become a link since it was resolved is refused."""
    fd = os.open(b"/", _OPEN | os.O_DIRECTORY)
    for part in real.split(b"/"):
        if part:
            try:
                inner = os.open(part, _OPEN, dir_fd=fd)
            finally:
                os.close(fd)
            fd = inner
    return fd


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
