"""The files of a spool: one for each request, with a name that tells what is inside.

Sorting the names gives the order in which the requests were put there:

    00000000000000000042-metrics-2000-1763820000.z
    00000000000000000043-metrics-300-1763820004-standing.z

A name holds the file's number, the signal, the count of points, and the second in which the
oldest point was measured. The second file holds current values alone ("standing"). It is dropped
before the first one, because the next export sends current values again.

A file is written under a name that starts with a dot and is then renamed. So a kill leaves either
the whole request or none of it. There is no fsync: a request survives a killed process, not a power
cut. The checksum tells of a file that a power cut tore, and that loss is counted.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path

from otel_ddp.agent.export.otlp.outcome import Signal

# How the names of offline agents' directories begin; a digest follows.
OFFLINE_PREFIX = "offline-"
LOCK = "lock"

# A file takes whole blocks: a hundred thousand tiny spans are not as small as they look.
BLOCK_BYTES = 4096

_NAME = re.compile(r"(\d{20})-(metrics|traces|logs)-(\d+)-(\d+)(-standing)?\.z")
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Entry:
    """One request on disk."""

    path: Path
    number: int
    signal: Signal
    points: int
    size_bytes: int
    irreplaceable: bool = True
    """Whether it holds what is sent only once."""
    oldest_s: int = 0
    """When the oldest point in it was measured, in seconds; 0: not known."""

    def read(self) -> bytes | None:
        """The request; None where the file is damaged; OSError where it cannot be read now."""
        packed = self.path.read_bytes()
        try:
            return zlib.decompress(packed)
        except zlib.error:
            return None


def pack(body: bytes) -> bytes:
    """A request as its file holds it."""
    return zlib.compress(body, 1)


def file_name(
    number: int, signal: Signal, points: int, oldest_s: int, irreplaceable: bool = True
) -> str:
    """The name of a request's file."""
    standing = "" if irreplaceable else "-standing"
    return f"{number:020d}-{signal}-{points}-{oldest_s}{standing}.z"


def size_on_disk(length: int) -> int:
    """How many bytes of the disk a file of this length takes."""
    return max(-(-length // BLOCK_BYTES), 1) * BLOCK_BYTES


def list_entries(directory: Path) -> list[Entry]:
    """The requests in a directory, in order, without locking it; raises OSError."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = [read_entry(directory, name, opened) for name in sorted(os.listdir(opened))]
    finally:
        os.close(opened)
    return [entry for entry in found if entry is not None]


def read_entry(directory: Path, name: str, opened: int) -> Entry | None:
    """A request by the name of its file; None where the name belongs to no request."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    try:
        found = os.stat(name, dir_fd=opened, follow_symlinks=False)
    except FileNotFoundError:
        return None  # another process removes files at this moment
    if not stat.S_ISREG(found.st_mode):
        return None
    number, points, oldest_s = int(match[1]), int(match[3]), int(match[4])
    signal: Signal = match[2]  # type: ignore[assignment]
    size_bytes, irreplaceable = size_on_disk(found.st_size), match[5] is None
    return Entry(directory / name, number, signal, points, size_bytes, irreplaceable, oldest_s)


def is_unfinished(name: str) -> bool:
    """Whether a file was begun by a process that was killed; its request is still in a journal."""
    return name.startswith(".") and name.endswith(".z")


def write(directory: int, name: str, content: bytes) -> None:
    """Write a file, or leave nothing of it behind; raises OSError."""
    hidden = f".{name}"
    descriptor = os.open(hidden, _NEW_FILE, 0o600, dir_fd=directory)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            # A full disk may accept a part and tell it by a short count.
            if file.write(content) != len(content):
                raise OSError(28, "No space left on device")
        os.rename(hidden, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(hidden, dir_fd=directory)
        raise
