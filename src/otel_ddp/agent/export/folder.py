"""A queue of requests. They are in memory at first, and in files once they have to wait.

Each request on disk is one file. Sorted by name, the files are in the order of the requests:

    00000000000000000042-metrics-2000-1763820000.z
    00000000000000000043-metrics-300-1763820004-standing.z

A name contains the file's number, the lane, the number of points, and the second of the oldest
point. A "standing" file has current values only. It is dropped first, because the next export sends
current values again.

A file is written under another name and then renamed, so an agent that is killed leaves a whole
request or none. Without fsync, a request survives a killed process but not a power cut: then the
checksum reveals a torn file, which is counted as lost.

The lock file reserves a folder for one agent. An agent that finds it locked uses the next name,
`-2` and so on. On a file system without locks, agents only avoid each other if their names differ.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import zlib
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from otel_ddp import files, shown

LOCK = "lock"
# The usual block size of a disk. File sizes are rounded up to whole blocks, since a tiny file takes
# a whole block.
BLOCK_BYTES = 4096

_MEMORY_LIMIT_BYTES = 32 << 20
_NAME = re.compile(r"(\d{20})-([0-9a-z]+)-(\d+)-(\d+)(-standing)?\.z")
# Why a request is removed. All reasons except `delivered` are losses.
Why = Literal["delivered", "refused", "corrupt", "spool_error", "spool_full", "memory_full", "age"]
# What the log says about losses that do not come from an answer of the receiver.
_CAUSES = {
    "spool_full": "the queue on disk is full (its limit for OTLP is OTEL_DDP_SPOOL_BYTES), so the "
    "oldest data makes room for the newest",
    "memory_full": "neither the receiver nor the disk takes data, and memory is full",
    "corrupt": "a queued file is damaged",
    "spool_error": "queued files are gone",
    "age": "data that was queued for too long is given up",
}
# How many folder names are tried. If so many are locked, the file system's locks do not work.
_MOST_OF_A_NAME = 64


# Size limit of one request, packed and unpacked. Our requests have 1 MB at most, but a file of
# another program may unpack to any size.
_LARGEST = 16 << 20


@dataclass(eq=False, slots=True)
class Request:
    """One request, until it is delivered or lost."""

    lane: str
    """The name of the lane, which has one receiver. Its requests are sent in order."""
    body: bytes
    """The content; empty once the request is in a file."""
    points: int
    irreplaceable: bool = True
    """Whether the data is sent only once, such as logged values, spans and events. Requests without
    such data are dropped first, as the next export sends their current values again."""
    oldest_s: int = 0
    """The time of the oldest point, in seconds; 0 if unknown."""
    number: int = 0
    """The number of the request's file, from 1; 0 if the request is in memory only."""
    path: Path = Path()
    size_bytes: int = 0
    """The size of the file on disk."""

    def read(self) -> bytes | None:
        """The body; None if the file is damaged or too large. Raises OSError."""
        if not self.number:
            return self.body
        packed = files.read(self.path, _LARGEST)
        unpacking = zlib.decompressobj()
        try:
            body = unpacking.decompress(packed, _LARGEST)
        except zlib.error:
            return None
        return body if unpacking.eof else None


def list_requests(folder: Path) -> list[Request]:
    """The requests in a folder, in order. Does not need the folder's lock. Raises OSError."""
    found = (_find(folder / name) for name in sorted(os.listdir(folder)))
    return [request for request in found if request is not None]


def _find(path: Path) -> Request | None:
    """Make a request from the name of its file; None if the file is no request."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        return None
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None  # another process has just removed it
    number, lane, points, oldest_s, standing = match.groups()
    return Request(
        lane,
        b"",
        int(points),
        irreplaceable=standing is None,
        oldest_s=int(oldest_s),
        number=int(number),
        path=path,
        size_bytes=_size_on_disk(found.st_size),
    )


def _size_on_disk(length: int) -> int:
    return max(-(-length // BLOCK_BYTES), 1) * BLOCK_BYTES


class Waiting:
    """The waiting requests of each lane, in order. `Queue` also writes them to disk. Not
    thread-safe."""

    def __init__(self, lanes: Collection[str]) -> None:
        # Requests by lane, in order. In each lane, the requests on disk are older than the requests
        # in memory.
        self.lanes: dict[str, dict[Request, None]] = {lane: {} for lane in lanes}
        self.problem = ""
        """Why the queue cannot write to the disk; else empty."""
        self.size_bytes = self.memory_bytes = 0
        """The size of all requests, on disk and in memory."""
        self.dropped: Counter[str] = Counter()
        """Lost points by reason, which is a label of the metric."""
        self.unlogged: Counter[str] = Counter()
        """Lost points by cause, the text of a log line, until that line is logged."""

    def oldest(self, lane: str) -> Request | None:
        """The lane's oldest request, which is sent next."""
        return next(iter(self.lanes[lane]), None)

    def newest(self, lane: str) -> Request | None:
        """The lane's newest request."""
        return next(reversed(self.lanes[lane]), None)

    def add(self, request: Request) -> None:
        """Append a request to its lane."""
        self.lanes[request.lane][request] = None
        self.size_bytes += request.size_bytes
        self.memory_bytes += len(request.body)

    def write(self, lane: str) -> None:
        """Write a lane's requests from memory to disk. Requests that cannot be written stay in
        memory."""

    def remove(self, request: Request, why: Why, cause: str = "") -> None:
        """Remove a request if it is still queued. *cause*: the reason of a loss, for the log."""
        if request in self.lanes[request.lane]:
            del self.lanes[request.lane][request]
            self.size_bytes -= request.size_bytes
            self.memory_bytes -= len(request.body)
            if why != "delivered":
                self.lose(request.points, why, cause or _CAUSES[why])

    def lose(self, points: int, why: str, cause: str) -> None:
        """Count lost points."""
        if points:
            self.dropped[why] += points
            self.unlogged[cause] += points

    def describe(self) -> str:
        """The size of the queue on disk and in memory, as a text for users."""
        parts = []
        if self.size_bytes:
            parts.append(f"{shown.size(self.size_bytes)} wait on disk")
        if self.memory_bytes:
            parts.append(f"{shown.size(self.memory_bytes)} wait in memory")
        if self.problem:
            parts.append(f"the disk does not take it ({self.problem})")
        return ", ".join(parts) or "nothing waits"


class Queue(Waiting):
    """The queue of one agent, with files. Raises nothing."""

    def __init__(
        self,
        lanes: Collection[str],
        folder: Path,
        limit_bytes: int,
        memory_limit_bytes: int = _MEMORY_LIMIT_BYTES,
    ) -> None:
        super().__init__(lanes)
        self.folder = self._wanted = folder
        """The folder in use. Its name may get a number until the folder is locked for us."""
        self._limit_bytes, self._memory_limit_bytes = limit_bytes, memory_limit_bytes
        self._lock_file: int | None = None
        self._next = 0
        """The number of the next file; 0 until the folder is locked and its files are listed."""
        # A missing folder is created when the first request is written.
        if os.path.lexists(folder):
            self._claim()

    def add(self, request: Request) -> None:
        super().add(request)
        # If the requests in memory exceed their limit, write them to disk. If that fails, drop
        # some.
        if self.memory_bytes > self._memory_limit_bytes:
            for lane in self.lanes:
                self.write(lane)
        while self.memory_bytes > self._memory_limit_bytes:
            self._drop_one("memory_full", on_disk=False)

    def write(self, lane: str) -> None:
        for request in [each for each in self.lanes[lane] if not each.number]:
            if not self._claim() or not self._write(request):
                return

    def _write(self, request: Request) -> bool:
        packed = zlib.compress(request.body, 1)
        size_bytes = _size_on_disk(len(packed))
        while self.size_bytes and self.size_bytes + size_bytes > self._limit_bytes:
            self._drop_one("spool_full", on_disk=True)
        about = f"{request.lane}-{request.points}-{request.oldest_s}"
        standing = "" if request.irreplaceable else "-standing"
        path = self.folder / f"{self._next:020d}-{about}{standing}.z"
        try:
            files.replace(path, packed)
        except OSError as error:
            self._set_problem(error)
            return False
        self.memory_bytes -= len(request.body)
        request.body, request.path = b"", path
        request.number, request.size_bytes = self._next, size_bytes
        self._next += 1
        self.size_bytes += size_bytes
        return True

    def remove(self, request: Request, why: Why, cause: str = "") -> None:
        super().remove(request, why, cause)
        if request.number:
            files.remove(request.path)

    def _drop_one(self, why: Why, *, on_disk: bool) -> None:
        """Drop the oldest request that has only current values, or else the oldest of all."""
        all_of_them = (each for lane in self.lanes.values() for each in lane)
        waiting = (each for each in all_of_them if bool(each.number) is on_disk)
        # Requests on disk are ordered by their numbers. All requests in memory have the number 0,
        # so their times decide.
        first = min(waiting, key=lambda each: (each.irreplaceable, each.number, each.oldest_s))
        self.remove(first, why)

    def _claim(self) -> bool:
        """Create and lock the folder, unless we hold it already; False if that fails."""
        # Check the folder each time, since it may have been removed or replaced.
        try:
            for number in range(2, _MOST_OF_A_NAME + 2):
                files.make_kept(self.folder, ours=True)
                if self._lock_folder():
                    if not self._next:
                        self._load()
                    self.problem = ""
                    return True
                if self._next:
                    break
                self.folder = self._wanted.with_name(f"{self._wanted.name}-{number}")
            raise BlockingIOError(errno.EAGAIN, "another agent uses it")
        except OSError as error:
            self._set_problem(error)
            return False

    def _set_problem(self, error: OSError) -> None:
        self.problem = f"{self.folder}: {error.strerror or error}"

    def _lock_folder(self) -> bool:
        """Lock the folder, unless we hold the lock; False if another agent does."""
        path = self.folder / LOCK
        # Compare the lock file without opening it: closing a second descriptor of a file would
        # release our lock on it.
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
            # Any other error means that the file system has no locks: continue without one.
        if self._lock_file is not None:
            os.close(self._lock_file)
        self._lock_file = descriptor
        return True

    def _load(self) -> None:
        """List an earlier agent's requests on disk. Requests that were only in the memory of that
        agent are lost, but their data is read again from the journals."""
        files.remove(*self.folder.glob("*.z.half"))
        # Raises OSError if the folder cannot be listed: otherwise, file numbers could be used
        # twice.
        found = list_requests(self.folder)
        in_memory = {name: list(lane) for name, lane in self.lanes.items()}
        for lane in self.lanes.values():
            lane.clear()
        for request in found:
            if request.lane in self.lanes:
                super().add(request)
            else:
                files.remove(request.path)  # its lane no longer exists
        for name, requests in in_memory.items():
            self.lanes[name].update(dict.fromkeys(requests))
        self._next = found[-1].number + 1 if found else 1
