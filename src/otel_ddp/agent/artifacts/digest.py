"""The digest of a file, and of a directory: that of the list of its files.

Of a directory it is the SHA-256 of what `sha256sum` prints for its files in the order of their
names. A link counts with the name that it leads to, and is not followed.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import NamedTuple

from otel_ddp.agent.artifacts import files
from otel_ddp.agent.artifacts.files import CannotRead, File

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
    if files.signature(files.listed(top)) != files.signature(found):
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
        with files.file_within(top, name) as fd:
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
        raise files.cannot(error) from None
    if at != size:
        raise CannotRead("it was written to while the agent read it", again=True)


def _line(part: Part) -> bytes:
    """As `sha256sum` writes it, where a backslash stands before odd characters."""
    name = part.name
    escaped = name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
    mark = b"\\" if escaped != name else b""
    return mark + part.digest.encode() + b"  " + escaped + b"\n"
