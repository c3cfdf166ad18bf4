"""Opens the files of an artifact, only where the agent may read them, and takes their digests.

No link of another user is followed: SECURITY.md says who may make the agent read what.

Of a directory the digest is the SHA-256 of what `sha256sum` prints for its files in the order of
their names. A link counts with the name that it leads to.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2s, sha256
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from otel_ddp import files

MOST_FILES = 100_000
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
            fd = os.open(there, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
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
    found_files: list[File] = []
    try:
        for folder, folders, names, fd in os.fwalk(b".", dir_fd=top, onerror=_raise):
            if len(found_files) + len(names) > MOST_FILES:
                raise CannotRead(f"there are more than {MOST_FILES} files in it")
            for name in (*names, *folders):
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                where = os.path.normpath(os.path.join(folder, name))
                if stat.S_ISLNK(found.st_mode):
                    found_files.append(_file(where, found, os.readlink(name, dir_fd=fd)))
                elif stat.S_ISREG(found.st_mode):
                    found_files.append(_file(where, found))
                elif not stat.S_ISDIR(found.st_mode):
                    raise CannotRead("there is something in it that is neither file nor directory")
    except OSError as error:
        raise cannot(error) from None
    return sorted(found_files)


def _raise(error: OSError) -> None:
    raise error


def _file(name: bytes, found: os.stat_result, link: bytes | None = None) -> File:
    return File(name, found.st_size, found.st_mtime_ns, found.st_ino, link)


def signature(found: Collection[File]) -> bytes:
    """Another one, as soon as a file of them was written to, replaced, added or removed."""
    return blake2s(repr([tuple(each) for each in found]).encode()).digest()


@contextmanager
def file_within(top: int, name: bytes) -> Iterator[int]:
    """A file of an open directory, itself open; no part of its name may be a link."""
    fd = os.dup(top)
    try:
        for part in name.split(b"/") if name else ():
            inner = files.open_private(os.fsdecode(part), dir_fd=fd)
            os.close(fd)
            fd = inner
        if not name:
            os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


CHUNK_BYTES = 1024 * 1024


class Stopped(Exception):
    """The agent ends: the next one goes on."""


class Pace:
    """Keeps reading below a number of bytes a second, and ends it when asked to. One an agent."""

    def __init__(
        self,
        bytes_per_s: int,
        *,
        stopping: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stopping = stopping or threading.Event()
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._free_at = clock()

    def take(self, count: int) -> None:
        """Wait until so many more bytes may be read. Raises `Stopped`."""
        now = self._clock()
        self._free_at = max(now, self._free_at) + count / self._bytes_per_s
        if self.stopping.wait(max(0.0, self._free_at - now)):
            raise Stopped


class Part(NamedTuple):
    """One file of an artifact."""

    name: bytes
    size: int
    digest: str
    is_link: bool


class Content(NamedTuple):
    """What was found."""

    size: int
    digest: str
    parts: tuple[Part, ...]


def content_of(top: int, found: Sequence[File], pace: Pace) -> Content:
    """Read all of what is open. Raises `CannotRead` if it changes meanwhile."""
    parts = tuple(_part(top, each, pace) for each in found)
    if signature(listed(top)) != signature(found):
        raise CannotRead("it was written to while the agent read it", again=True)
    size = sum(each.size for each in parts)
    if len(parts) == 1 and not parts[0].name:
        return Content(size, parts[0].digest, parts)
    return Content(size, sha256(lines(parts)).hexdigest(), parts)


def lines(parts: Sequence[Part]) -> bytes:
    """The list of a directory's files, whose digest is that of the directory."""
    return b"".join(_line(each) for each in parts)


def _part(top: int, file: File, pace: Pace) -> Part:
    if file.link is not None:
        return Part(file.name, 0, sha256(file.link).hexdigest(), True)
    digest = sha256()
    for chunk in chunks(top, file.name, file.size, pace):
        digest.update(chunk)
    return Part(file.name, file.size, digest.hexdigest(), False)


def chunks(top: int, name: bytes, size: int, pace: Pace) -> Iterator[bytes]:
    """The content of one file. Raises `CannotRead` if it has another size."""
    try:
        with file_within(top, name) as fd:
            at = 0
            # One byte more than there should be shows a file that grows.
            while wanted := min(CHUNK_BYTES, size + 1 - at):
                pace.take(wanted)
                chunk = os.pread(fd, wanted, at)
                if not chunk:
                    break
                at += len(chunk)
                yield chunk
    except OSError as error:
        raise cannot(error) from None
    if at != size:
        raise CannotRead("it was written to while the agent read it", again=True)


def _line(part: Part) -> bytes:
    """As `sha256sum` writes it, where a backslash stands before odd characters."""
    name = part.name
    escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
    mark = b"\\" if escaped != name else b""
    return mark + part.digest.encode() + b"  " + escaped + b"\n"
