"""Keeps undelivered requests on disk, up to a limit: drops the oldest first and counts them.

There is a file for each request, and its name tells what is inside. Sorting the names gives the
order in which the requests were put there:

    00000000000000000042-metrics-2000-1763820000.z
    00000000000000000043-metrics-300-1763820004-standing.z

A name holds the file's number, the signal, the count of points, and the second in which the
oldest point was measured. The second file holds current values alone ("standing"). It is dropped
before the first one, because the next export sends current values again.

A file is written aside and renamed. So a kill leaves either the whole request or none of it. There
is no fsync: a request survives a killed process, not a power cut. The checksum tells of a file that
a power cut tore, and that loss is counted.

A lock on the file `lock` keeps a directory for one agent. An agent that finds it locked uses the
next one of the same name, `-2` and so on. Where a file system has no locks, the name alone keeps
agents apart.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from otel_ddp import files
from otel_ddp.agent.export.otlp import SIGNALS, Request, Signal

# How the names of offline agents' directories begin; a digest follows.
OFFLINE_PREFIX = "offline-"
LOCK = "lock"
# A file takes whole blocks: a hundred thousand tiny spans are not as small as they look.
BLOCK_BYTES = 4096
# Of one request, packed or not: ours have 1 MB. A copy from elsewhere may unpack to any size.
_LARGEST = 16 << 20

_NAME = re.compile(r"(\d{20})-(metrics|traces|logs)-(\d+)-(\d+)(-standing)?\.z")
# Why a request is done with; the last three are losses.
Why = Literal["delivered", "refused", "corrupt", "spool_error", "spool_full"]
_LOSSES = ("corrupt", "spool_error", "spool_full")
# More living agents of one name and place than this mean a file system whose locks do not work.
_MOST_OF_A_NAME = 64


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
        """The request; OSError where it cannot be read now.

        None where the file is damaged, or unpacks to more than any request of ours.
        """
        packed = files.read(self.path, _LARGEST)
        unpacking = zlib.decompressobj()
        try:
            body = unpacking.decompress(packed, _LARGEST)
        except zlib.error:
            return None
        return body if unpacking.eof else None


def list_entries(directory: Path) -> list[Entry]:
    """The requests in a directory, in order, without locking it. Raises OSError."""
    found = (_read_entry(directory / name) for name in sorted(os.listdir(directory)))
    return [entry for entry in found if entry is not None]


def _read_entry(path: Path) -> Entry | None:
    """A request by the name of its file; None where the name belongs to no request."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None  # another process removes files at this moment
    if not stat.S_ISREG(found.st_mode):
        return None
    number, signal, points, oldest_s, standing = match.groups()
    return Entry(
        *(path, int(number), signal, int(points), _size_on_disk(found.st_size)),  # type: ignore[arg-type]
        irreplaceable=standing is None,
        oldest_s=int(oldest_s),
    )


def _size_on_disk(length: int) -> int:
    return max(-(-length // BLOCK_BYTES), 1) * BLOCK_BYTES


class Entries:
    """Requests on disk, in order, to which none can be added. Not locked."""

    def __init__(self) -> None:
        self.problem: str | None = None
        """Why nothing can be written at the moment; None while all is well."""
        self.size_bytes = 0
        """How much disk the requests take."""
        self.dropped: Counter[str] = Counter()
        """Points that were lost here, by reason: spool_full, spool_error, corrupt."""
        # A dict keeps the order in which they were added.
        self._entries: dict[Signal, dict[Path, Entry]] = {signal: {} for signal in SIGNALS}
        self._standing: dict[Path, Entry] = {}
        """Those with current values alone, which are dropped first."""

    @property
    def entries(self) -> int:
        """How many requests there are."""
        return sum(map(len, self._entries.values()))

    def oldest(self, signal: Signal) -> Entry | None:
        """The oldest request of a signal."""
        return next(iter(self._entries[signal].values()), None)

    def append(self, request: Request) -> Entry | None:
        """Put a request behind all others; None if it is not accepted: the caller still has it."""
        return None

    def add(self, entry: Entry) -> None:
        """One that is on disk already."""
        self._entries[entry.signal][entry.path] = entry
        if not entry.irreplaceable:
            self._standing[entry.path] = entry
        self.size_bytes += entry.size_bytes

    def remove(self, entry: Entry, why: Why) -> None:
        """Done with, if it is still here."""
        if self._entries[entry.signal].pop(entry.path, None) is None:
            return
        self._standing.pop(entry.path, None)
        self.size_bytes -= entry.size_bytes
        if why in _LOSSES:
            self.dropped[why] += entry.points


class Spool(Entries):
    """A directory of requests. Nothing here raises."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        super().__init__()
        self.directory = self._wanted = directory
        """Where the files are, which may be the next one of that name; fixed once it is in use."""
        self._limit_bytes = limit_bytes
        self._lock_file: int | None = None
        self._loaded = False
        self._next = 1
        # Reads only: no directory is made before there is a request for it.
        with self._problems(), contextlib.suppress(FileNotFoundError):
            os.lstat(directory)
            self._claim()

    def append(self, request: Request) -> Entry | None:
        packed = zlib.compress(request.body, 1)
        size_bytes = _size_on_disk(len(packed))
        with self._problems():
            self._claim()
            while self.size_bytes + size_bytes > self._limit_bytes:
                self._drop_one()
            about = f"{request.signal}-{request.points}-{request.oldest_s}"
            standing = "" if request.irreplaceable else "-standing"
            path = self.directory / f"{self._next:020d}-{about}{standing}.z"
            files.replace(path, packed)
            entry = Entry(
                *(path, self._next, request.signal, request.points, size_bytes),
                *(request.irreplaceable, request.oldest_s),
            )
            self._next += 1
            self.add(entry)
            self.problem = None
            return entry
        return None

    def remove(self, entry: Entry, why: Why) -> None:
        super().remove(entry, why)
        files.remove(entry.path)

    def _drop_one(self) -> None:
        """The oldest with current values; where there is none, the oldest of all."""
        firsts = [self._standing, *self._entries.values()]
        found = [entry for of in firsts if (entry := next(iter(of.values()), None))]
        self.remove(min(found, key=lambda each: (each.irreplaceable, each.number)), "spool_full")

    def _claim(self) -> None:
        """See to it that the directory is ours alone, and of this agent alone. Raises OSError."""
        # Anew each time: since the last time it may have been removed or replaced.
        for number in range(2, _MOST_OF_A_NAME + 2):
            files.make_kept(self.directory, ours=True)
            if self._lock_directory():
                if not self._loaded:
                    self._load()
                return
            if self._loaded:
                break
            self.directory = self._wanted.with_name(f"{self._wanted.name}-{number}")
        raise BlockingIOError(errno.EAGAIN, "another agent uses it")

    def _lock_directory(self) -> bool:
        """Lock it unless we hold its lock already; False where another agent does."""
        path = self.directory / LOCK
        # Compared without opening it: closing any descriptor of it would give the lock back.
        if self._lock_file is not None:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.lstat(path), os.fstat(self._lock_file)):
                    return True
        descriptor = files.open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            files.lock(descriptor)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                os.close(descriptor)
                return False
            # Any other error: this file system has no locks.
        if self._lock_file is not None:
            os.close(self._lock_file)
        self._lock_file = descriptor
        return True

    def _load(self) -> None:
        """Read what an earlier process left. Its unfinished requests are still in a journal."""
        files.remove(*self.directory.glob("*.z.half"))
        # All or nothing: a number that is overlooked would be given a second time.
        for entry in list_entries(self.directory):
            self.add(entry)
            self._next = entry.number + 1
        self._loaded = True

    @contextlib.contextmanager
    def _problems(self) -> Iterator[None]:
        """Keep what is wrong with the directory as our problem, and raise nothing."""
        try:
            yield
        except OSError as error:
            # It may be about one above it.
            above = error.filename in map(str, self.directory.parents)
            where = error.filename if above else self.directory
            self.problem = f"{where}: {error.strerror or error}"
        except ValueError as error:
            # A name that no file can have.
            self.problem = f"{str(self.directory)!r}: {error}"
