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
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import NamedTuple
from urllib.parse import unquote_to_bytes

from otel_ddp import files

MOST_FILES = 100_000
CHUNK_BYTES = 1024 * 1024
_BYTES_PER_S = 200 * 1024 * 1024
_LOOK = os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW
_MOST_LINKS = 40
_CHANGED = "it was written to while the agent read it"


class CannotRead(Exception):
    """The text says why."""

    def __init__(self, why: str, *, again: bool = False) -> None:
        """*again*: whether it may be readable later."""
        super().__init__(why)
        self.again = again


class File(NamedTuple):
    """A file, or a link within a directory, as it was found."""

    name: bytes
    """Its path within the directory; empty if the artifact is one file."""
    size: int
    mtime_ns: int
    inode: int
    link: bytes | None
    """Where a link leads."""


class Content(NamedTuple):
    """All of an artifact, read once."""

    size: int
    digest: str
    digests: dict[File, str]
    """By file, in the order of their names."""

    def listing(self) -> bytes:
        """As `sha256sum` prints it for a directory; empty if the artifact is one file."""
        return b"".join(_line(file.name, digest) for file, digest in self.digests.items())


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


def listed(top: int) -> tuple[File, ...]:
    """All files of what is open, by their names; one file has an empty name."""
    status = os.fstat(top)
    if stat.S_ISREG(status.st_mode):
        return (_file(b"", status),)
    if not stat.S_ISDIR(status.st_mode):
        raise CannotRead("it is neither a file nor a directory")
    found: list[File] = []
    try:
        for folder, folders, names, fd in os.fwalk(b".", dir_fd=top, onerror=_raise):
            if len(found) + len(names) > MOST_FILES:
                raise CannotRead(f"there are more than {MOST_FILES} files in it")
            for name in (*names, *folders):
                status = os.stat(name, dir_fd=fd, follow_symlinks=False)
                where = os.path.normpath(os.path.join(folder, name))
                if stat.S_ISLNK(status.st_mode):
                    found.append(_file(where, status, os.readlink(name, dir_fd=fd)))
                elif stat.S_ISREG(status.st_mode):
                    found.append(_file(where, status))
                elif not stat.S_ISDIR(status.st_mode):
                    raise CannotRead("there is something in it that is neither file nor directory")
    except OSError as error:
        raise cannot(error) from None
    return tuple(sorted(found))


def _raise(error: OSError) -> None:
    raise error


def _file(name: bytes, found: os.stat_result, link: bytes | None = None) -> File:
    size = found.st_size if link is None else 0
    return File(name, size, found.st_mtime_ns, found.st_ino, link)


class Stopped(Exception):
    """The agent ends: the next one goes on."""


class Pace:
    """Keeps reading below a number of bytes a second, and ends it when asked to. One an agent."""

    def __init__(
        self,
        bytes_per_s: int = _BYTES_PER_S,
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


def content_of(top: int, found: tuple[File, ...], pace: Pace) -> Content:
    """Read all of what is open. Raises `CannotRead` if it changes meanwhile."""
    digests = {}
    for file in found:
        digest = sha256(file.link or b"")
        for chunk in chunks(top, file, pace) if file.link is None else ():
            digest.update(chunk)
        digests[file] = digest.hexdigest()
    if listed(top) != found:
        raise CannotRead(_CHANGED, again=True)
    content = Content(sum(file.size for file in found), "", digests)
    listing = content.listing()
    whole = sha256(listing).hexdigest() if listing or not found else digests[found[0]]
    return content._replace(digest=whole)


def chunks(top: int, file: File, pace: Pace) -> Iterator[bytes]:
    """The bytes of a file of what is open; no part of its name may be a link by now."""
    fd, count = os.dup(top), 0
    try:
        for part in file.name.split(b"/") if file.name else ():
            inner = files.open_private(os.fsdecode(part), dir_fd=fd)
            os.close(fd)
            fd = inner
        while count <= file.size and (chunk := os.pread(fd, CHUNK_BYTES, count)):
            count += len(chunk)
            if count <= file.size:
                pace.take(len(chunk))
                yield chunk
    except OSError as error:
        raise cannot(error) from None
    finally:
        os.close(fd)
    if count != file.size:
        raise CannotRead(_CHANGED, again=True)


def _line(name: bytes, digest: str) -> bytes:
    """As `sha256sum` writes it, where a backslash stands before odd characters."""
    escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
    mark = b"\\" if escaped != name else b""
    return mark + digest.encode() + b"  " + escaped + b"\n" if name else b""
