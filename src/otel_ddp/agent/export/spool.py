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
import threading
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from otel_ddp import files
from otel_ddp.agent.export.otlp.outcome import SIGNALS, Request, Signal
from otel_ddp.journal import locks

# How the names of offline agents' directories begin; a digest follows.
OFFLINE_PREFIX = "offline-"
LOCK = "lock"
# A file takes whole blocks: a hundred thousand tiny spans are not as small as they look.
BLOCK_BYTES = 4096

_NAME = re.compile(r"(\d{20})-(metrics|traces|logs)-(\d+)-(\d+)(-standing)?\.z")
# Why a request is done with.
Why = Literal["delivered", "refused", "corrupt"]
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
        """The request; None where the file is damaged; OSError where it cannot be read now."""
        packed = self.path.read_bytes()
        try:
            return zlib.decompress(packed)
        except zlib.error:
            return None


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


def _file_name(number: int, request: Request) -> str:
    standing = "" if request.irreplaceable else "-standing"
    return f"{number:020d}-{request.signal}-{request.points}-{request.oldest_s}{standing}.z"


def _size_on_disk(length: int) -> int:
    return max(-(-length // BLOCK_BYTES), 1) * BLOCK_BYTES


class Store(Protocol):
    """What the delivery uses of a spool."""

    @property
    def problem(self) -> str | None: ...

    @property
    def has_room(self) -> bool: ...

    @property
    def entries(self) -> int: ...

    @property
    def size_bytes(self) -> int: ...

    @property
    def dropped_points(self) -> Mapping[str, int]: ...

    def append(self, request: Request) -> Entry | None: ...

    def oldest(self, signal: Signal) -> Entry | None: ...

    def protect(self, entry: Entry) -> None: ...

    def unprotect(self, entry: Entry) -> None: ...

    def remove(self, entry: Entry, why: Why) -> None: ...


class Spool:
    """A directory of requests in order. Nothing here raises; any thread may call."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory = self._wanted = directory
        """Where the files are, which may be the next one of that name; fixed once it is in use."""
        self.limit_bytes = limit_bytes
        self.problem: str | None = None
        """Why nothing can be written at the moment; None while all is well."""
        self._lock = threading.Lock()
        self._lock_file: int | None = None
        self._loaded = False
        # Numbers only grow, and a dict keeps the order in which they were added.
        self._entries: dict[Signal, dict[int, Entry]] = {signal: {} for signal in SIGNALS}
        self._standing: dict[int, Entry] = {}
        """Those with current values alone, which are dropped first."""
        self._protected: set[int] = set()
        self._dropped: Counter[str] = Counter()
        self.size_bytes = 0
        """How much disk the requests take."""
        self._next = 1
        # Reads only: no directory is made before there is a request for it.
        with self._lock, self._problems(), contextlib.suppress(FileNotFoundError):
            os.lstat(directory)
            self._claim()

    @property
    def entries(self) -> int:
        """How many requests there are."""
        return sum(map(len, self._entries.values()))

    @property
    def has_room(self) -> bool:
        """Whether it is far from its limit."""
        return self.size_bytes < 0.9 * self.limit_bytes

    @property
    def dropped_points(self) -> Mapping[str, int]:
        """Points that were lost here, by reason: spool_full, spool_error, corrupt."""
        with self._lock:
            return dict(self._dropped)

    def append(self, request: Request) -> Entry | None:
        """Put a request behind all others; None if the disk does not accept it.

        A request that is not accepted does not count as lost: the caller still has it.
        """
        packed = zlib.compress(request.body, 1)
        size_bytes = _size_on_disk(len(packed))
        with self._lock:
            if size_bytes > self.limit_bytes:
                self.problem = f"a request of {size_bytes} bytes is larger than the spool"
                return None
            with self._problems():
                self._claim()
                self._make_room(size_bytes)
                number, self._next = self._next, self._next + 1
                path = self.directory / _file_name(number, request)
                files.replace(path, packed)
                entry = Entry(
                    *(path, number, request.signal, request.points, size_bytes),
                    *(request.irreplaceable, request.oldest_s),
                )
                self._add(entry)
                self.problem = None
                return entry
        return None

    def oldest(self, signal: Signal) -> Entry | None:
        """The oldest request of a signal."""
        with self._lock:
            while (entry := next(iter(self._entries[signal].values()), None)) is not None:
                if not _is_missing(entry.path):
                    return entry
                # Its file was removed by another program.
                self._remove(entry, "spool_error")
        return None

    def protect(self, entry: Entry) -> None:
        """Mark a request that is being sent: it is not dropped to make room."""
        with self._lock:
            self._protected.add(entry.number)

    def unprotect(self, entry: Entry) -> None:
        """Take the mark away: the request was not delivered."""
        with self._lock:
            self._protected.discard(entry.number)

    def remove(self, entry: Entry, why: Why) -> None:
        """Remove a request that is done with."""
        with self._lock:
            if entry.number in self._entries[entry.signal]:
                self._remove(entry, why if why == "corrupt" else "")

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
        descriptor = files.open_private(path, os.O_RDWR | os.O_CREAT)
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

    def _load(self) -> None:
        """Read what an earlier process left. Its unfinished requests are still in a journal."""
        files.remove(*self.directory.glob("*.z.half"))
        # All or nothing: a number that is overlooked would be given a second time.
        for entry in list_entries(self.directory):
            self._add(entry)
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

    def _make_room(self, size_bytes: int) -> None:
        while self.size_bytes + size_bytes > self.limit_bytes:
            standing = (e for e in self._standing.values() if e.number not in self._protected)
            entry = next(standing, None) or self._first(self._protected) or self._first(set())
            if entry is None:
                return
            self._remove(entry, "spool_full")

    def _first(self, without: Set[int]) -> Entry | None:
        firsts = (
            next((entry for number, entry in of.items() if number not in without), None)
            for of in self._entries.values()
        )
        return min(filter(None, firsts), key=lambda entry: entry.number, default=None)

    def _add(self, entry: Entry) -> None:
        self._entries[entry.signal][entry.number] = entry
        if not entry.irreplaceable:
            self._standing[entry.number] = entry
        self.size_bytes += entry.size_bytes

    def _remove(self, entry: Entry, lost: str) -> None:
        del self._entries[entry.signal][entry.number]
        self._standing.pop(entry.number, None)
        self._protected.discard(entry.number)
        self.size_bytes -= entry.size_bytes
        files.remove(entry.path)
        if lost:
            self._dropped[lost] += entry.points


def _is_missing(path: Path) -> bool:
    """Whether a file certainly does not exist: one that cannot be seen now may be seen later."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
