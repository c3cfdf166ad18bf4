"""Requests that wait: in memory at first, and in files of a folder once they have to wait for long.

There is a file for each request, and its name tells what is inside. Sorting the names gives the
order in which the requests were put there:

    00000000000000000042-metrics-2000-1763820000.z
    00000000000000000043-metrics-300-1763820004-standing.z

A name holds the file's number, the lane, the count of points, and the second in which the
oldest point was measured. The second file holds current values alone ("standing"). It is dropped
before the first one, because the next export sends current values again.

A file is written aside and renamed. So a kill leaves either the whole request or none of it. There
is no fsync: a request survives a killed process, not a power cut. The checksum tells of a file that
a power cut tore, and that loss is counted.

A lock on the file `lock` keeps a folder for one agent. An agent that finds it locked uses the
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
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from otel_ddp import files, shown

LOCK = "lock"
# A file takes whole blocks: a hundred thousand tiny spans are not as small as they look.
BLOCK_BYTES = 4096

_MEMORY_LIMIT_BYTES = 32 << 20
_NAME = re.compile(r"(\d{20})-([0-9a-z]+)-(\d+)-(\d+)(-standing)?\.z")
# Why a request is done with; all but the first two are losses.
Why = Literal["delivered", "refused", "corrupt", "spool_error", "spool_full", "memory_full", "age"]
# Losses that no answer of a receiver tells of.
_CAUSES = {
    "spool_full": "the disk holds as much as may wait there (of OTLP OTEL_DDP_SPOOL_BYTES), so the "
    "oldest data make room for the newest",
    "memory_full": "neither the receiver nor the disk takes data, and memory is full",
    "corrupt": "a file that waited is damaged",
    "spool_error": "files that waited are gone",
    "age": "what has waited too long is given up",
}
# More living agents of one name and place than this mean a file system whose locks do not work.
_MOST_OF_A_NAME = 64


# Of one request, packed or not: ours have 1 MB. A copy from elsewhere may unpack to any size.
_LARGEST = 16 << 20


@dataclass(eq=False, slots=True)
class Request:
    """One, from when it is made until it is delivered or lost."""

    lane: str
    """Whom it is for. The requests of a lane are sent in their order."""
    body: bytes
    """Empty once the request is in its file."""
    points: int
    irreplaceable: bool = True
    """Whether it holds what is sent only once: logged values, spans, events. A request with
    current values alone is replaced by the next export, so it is dropped first."""
    oldest_s: int = 0
    """When the oldest point in it was measured, in seconds; 0: not known."""
    number: int = 0
    """Of its file, from 1 on; 0: it is in memory alone."""
    path: Path = Path()
    size_bytes: int = 0
    """What that takes of the disk."""

    def read(self) -> bytes | None:
        """Its body; OSError where the file cannot be read now.

        None where the file is damaged, or unpacks to more than any request of ours.
        """
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
    """The requests in a folder, in order, without locking it. Raises OSError."""
    found = (_find(folder / name) for name in sorted(os.listdir(folder)))
    return [request for request in found if request is not None]


def _find(path: Path) -> Request | None:
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
    """The requests of each lane, in order. Not locked."""

    def __init__(self, lanes: Collection[str]) -> None:
        # A dictionary keeps the order. In a lane those on disk are older than those in memory.
        self.lanes: dict[str, dict[Request, None]] = {lane: {} for lane in lanes}
        self.problem = ""
        """Why nothing can be written at the moment; empty while all is well."""
        self.size_bytes = self.memory_bytes = 0
        """How much they take of the disk, and of memory."""
        self.dropped: Counter[str] = Counter()
        """Points that are lost, by reason."""
        self.unlogged: Counter[str] = Counter()
        """Those that no line of the log has told yet, by cause."""

    def oldest(self, lane: str) -> Request | None:
        """The one to be sent next."""
        return next(iter(self.lanes[lane]), None)

    def newest(self, lane: str) -> Request | None:
        """The one that came last."""
        return next(reversed(self.lanes[lane]), None)

    def add(self, request: Request) -> None:
        """Put one behind all others of its lane."""
        self.lanes[request.lane][request] = None
        self.size_bytes += request.size_bytes
        self.memory_bytes += len(request.body)

    def write(self, lane: str) -> None:
        """Put on disk what is in memory, if there is a disk; what it does not take stays."""

    def remove(self, request: Request, why: Why, cause: str = "") -> None:
        """Done with, if it is still here. *cause*: what the answer of a receiver says."""
        if request in self.lanes[request.lane]:
            del self.lanes[request.lane][request]
            self.size_bytes -= request.size_bytes
            self.memory_bytes -= len(request.body)
            if why != "delivered":
                self.lose(request.points, why, cause or _CAUSES[why])

    def lose(self, points: int, why: str, cause: str) -> None:
        """Count what is lost, if it is anything."""
        if points:
            self.dropped[why] += points
            self.unlogged[cause] += points

    def describe(self) -> str:
        """What waits, and where."""
        parts = []
        if self.size_bytes:
            parts.append(f"{shown.size(self.size_bytes)} wait on disk")
        if self.memory_bytes:
            parts.append(f"{shown.size(self.memory_bytes)} wait in memory")
        if self.problem:
            parts.append(f"the disk does not take it ({self.problem})")
        return ", ".join(parts) or "nothing waits"


class Queue(Waiting):
    """Those of one agent. Nothing here raises."""

    def __init__(
        self,
        lanes: Collection[str],
        folder: Path,
        limit_bytes: int,
        memory_limit_bytes: int = _MEMORY_LIMIT_BYTES,
    ) -> None:
        super().__init__(lanes)
        self.folder = self._wanted = folder
        """Where the files are, which may be the next one of that name; fixed once it is in use."""
        self._limit_bytes, self._memory_limit_bytes = limit_bytes, memory_limit_bytes
        self._lock_file: int | None = None
        self._next = 0
        """The number of the next file; 0: what an earlier agent left is not read yet."""
        # No folder is made before there is a request for it.
        if os.path.lexists(folder):
            self._claim()

    def add(self, request: Request) -> None:
        super().add(request)
        # Each helps the other one out.
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
            self._say(error)
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
        """The oldest with current values; where there is none, the oldest of all."""
        all_of_them = (each for lane in self.lanes.values() for each in lane)
        waiting = (each for each in all_of_them if bool(each.number) is on_disk)
        # In memory they have no number yet.
        first = min(waiting, key=lambda each: (each.irreplaceable, each.number, each.oldest_s))
        self.remove(first, why)

    def _claim(self) -> bool:
        """See to it that the folder is ours alone, and of this agent alone; False: it is not."""
        # Anew each time: since the last time it may have been removed or replaced.
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
            self._say(error)
            return False

    def _say(self, error: OSError) -> None:
        """Keep what is wrong as our problem."""
        # It may be about one above it.
        above = error.filename in map(str, self.folder.parents)
        where = error.filename if above else self.folder
        self.problem = f"{where}: {error.strerror or error}"

    def _lock_folder(self) -> bool:
        """Lock it unless we hold its lock already; False where another agent does."""
        path = self.folder / LOCK
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
        """Read what an earlier agent left. What it had in memory alone is still in a journal."""
        files.remove(*self.folder.glob("*.z.half"))
        # All or nothing: a number that is overlooked would be given a second time.
        found = list_requests(self.folder)
        in_memory = {name: list(lane) for name, lane in self.lanes.items()}
        for lane in self.lanes.values():
            lane.clear()
        for request in found:
            if request.lane in self.lanes:
                super().add(request)
            else:
                files.remove(request.path)  # nobody sends there any more
        for name, requests in in_memory.items():
            self.lanes[name].update(dict.fromkeys(requests))
        self._next = found[-1].number + 1 if found else 1
