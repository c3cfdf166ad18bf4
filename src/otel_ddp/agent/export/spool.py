"""What could not be delivered waits here, bounded, oldest dropped first and counted.

One file a request, named so that sorting gives the order and the name tells what is inside:

    00000000000000000042-metrics-2000-1763820000.z
    00000000000000000043-metrics-300-1763820004-standing.z

That is: its number, the signal, how many points, and the second in which the oldest of them was
measured. The second file is dropped before the first: how series stand is told again anyway.

A file is written under a name that starts with a dot and then renamed, so a kill leaves either the
whole request or none of it. There is no fsync: what survives is a killed process, not a power
cut; a file that a power cut tore is found out by its checksum, and counted.

A lock on the file `lock` keeps a directory for one agent. Who finds it held uses the next of the
same name, `-2` and so on. Where a file system has no locks, the name alone keeps agents apart.
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
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from otel_ddp.agent.export.otlp.outcome import SIGNALS, Signal
from otel_ddp.journal import locks

# What the directories of offline agents are called, before the digest.
OFFLINE = "offline-"

# A file takes whole blocks: a hundred thousand tiny spans are not as small as they look.
BLOCK = 4096

Loss = Literal["spool_full", "spool_error", "corrupt"]

_NAME = re.compile(r"(\d{20})-(metrics|traces|logs)-(\d+)-(\d+)(-standing)?\.z")
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
LOCK = "lock"
_LOCK_FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
# Agents of one name and place, all alive: so many are a file system whose locks cannot be had.
_MOST_OF_A_NAME = 64


@dataclass(frozen=True)
class Entry:
    """One request on disk."""

    path: Path
    number: int
    signal: Signal
    points: int
    size_bytes: int
    lasting: bool = True
    """Whether it holds what nobody sends again."""
    oldest_s: int = 0
    """When the oldest point in it was measured, in seconds; 0: not known."""

    def read(self) -> bytes | None:
        """The request, None where the file is not what was written; OSError: not now."""
        packed = self.path.read_bytes()
        try:
            return zlib.decompress(packed)
        except zlib.error:
            return None


class Spool:
    """A directory of requests in order. Nothing here raises; any thread may call."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory = directory
        """Where it lies; from the first request on it stays there."""
        self._named = directory
        self._held: int | None = None
        """The lock on the directory."""
        self.limit_bytes = limit_bytes
        self.problem: str | None = None
        """Why nothing can be written at the moment; None while all is well."""
        self._lock = threading.Lock()
        # Numbers only grow, and a dict keeps the order in which they came.
        self._entries: dict[Signal, dict[int, Entry]] = {signal: {} for signal in SIGNALS}
        self._standing: dict[int, Entry] = {}
        """Those of them that are dropped first."""
        self._kept: set[int] = set()
        self._dropped: Counter[str] = Counter()
        self._size_bytes = 0
        self._next = 1
        self._loaded = False
        # Only a look: nothing is made before there is something to put there.
        with (
            self._lock,
            self._owning_up(),
            contextlib.suppress(FileNotFoundError),
            self._opened() as opened,
        ):
            self._load(opened)

    @property
    def size_bytes(self) -> int:
        """How much disk the waiting requests take."""
        return self._size_bytes

    @property
    def entries(self) -> int:
        """How many requests wait."""
        return sum(map(len, self._entries.values()))

    @property
    def dropped_points(self) -> Mapping[str, int]:
        """Points that were lost here, by why."""
        with self._lock:
            return dict(self._dropped)

    def append(
        self, signal: Signal, body: bytes, points: int, lasting: bool = True, oldest_s: int = 0
    ) -> Entry | None:
        """Put a request behind all others; None if the disk does not take it.

        What is not taken is not counted as lost: whoever asked still has it.
        """
        packed = zlib.compress(body, 1)
        cost = _on_disk(len(packed))
        with self._lock:
            if cost > self.limit_bytes:
                self.problem = f"a request of {cost} bytes is larger than the spool"
                return None
            entry: Entry | None = None
            with self._owning_up():
                with self._opened(make=True) as directory:
                    self._load(directory)
                    self._make_room(directory, cost)
                    number = self._next
                    standing = "" if lasting else "-standing"
                    name = f"{number:020d}-{signal}-{points}-{oldest_s}{standing}.z"
                    self._next += 1
                    _write(directory, name, packed)
                path = self.directory / name
                entry = Entry(path, number, signal, points, cost, lasting, oldest_s)
                self._remember(entry)
                self.problem = None
            return entry

    def oldest(self, signal: Signal | None = None) -> Entry | None:
        """The request that waits longest, of one signal or of all."""
        with self._lock:
            while (entry := self._first(SIGNALS if signal is None else (signal,))) is not None:
                if not _gone(entry.path):
                    return entry
                # Somebody cleaned up behind our back.
                self._forget(entry)
                self._dropped["spool_error"] += entry.points
        return None

    def keep(self, entry: Entry) -> None:
        """This one is on its way: until it is released, it is not dropped to make room."""
        with self._lock:
            self._kept.add(entry.number)

    def release(self, entry: Entry) -> None:
        """It came back, and is as good as any other."""
        with self._lock:
            self._kept.discard(entry.number)

    def remove(self, entry: Entry, lost: Loss | None = None) -> None:
        """Take a request away: it was delivered, or it is lost."""
        with self._lock:
            if entry.number not in self._entries[entry.signal]:
                return
            self._forget(entry)
            if lost is not None:
                self._dropped[lost] += entry.points
            with contextlib.suppress(OSError, ValueError), self._opened() as directory:
                os.unlink(entry.path.name, dir_fd=directory)

    def _load(self, directory: int) -> None:
        """What an earlier process left; done once, as soon as the directory can be read."""
        if not self._loaded:
            # All or nothing: a number that is not seen would be given a second time.
            for entry in [self._found(directory, name) for name in sorted(os.listdir(directory))]:
                if entry is not None:
                    self._remember(entry)
            self._next = max((max(of, default=0) for of in self._entries.values()), default=0) + 1
            self._loaded = True

    def _found(self, directory: int, name: str) -> Entry | None:
        if name.startswith(".") and name.endswith(".z"):
            # Begun by a process that was killed; the request is still in its journal.
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=directory)
            return None
        return _entry(self.directory, name, directory)

    @contextlib.contextmanager
    def _owning_up(self) -> Iterator[None]:
        """Whatever is wrong with the directory is our problem, and nobody else's."""
        try:
            yield
        except OSError as error:
            self.problem = f"{self.directory}: {error.strerror or error}"
        except ValueError as error:
            # A name that no file can have.
            self.problem = f"{str(self.directory)!r}: {error}"

    def _make(self) -> None:
        """The directory and what is missing above it, closed to others."""
        missing = []
        for path in (self.directory, *self.directory.parents):
            if os.path.lexists(path):
                break
            missing.append(path)
        for path in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(path, 0o700)
                os.chmod(path, 0o700)  # whatever the umask took away

    @contextlib.contextmanager
    def _opened(self, make: bool = False) -> Iterator[int]:
        """The directory, certainly ours alone; FileNotFoundError where there is none."""
        # Opened anew each time: it may have been cleaned away, or swapped, since the last.
        with contextlib.ExitStack() as stack:
            for number in range(2, _MOST_OF_A_NAME + 2):
                if make:
                    self._make()
                descriptor = self._open(stack)
                if self._is_held(descriptor):
                    yield descriptor
                    return
                if self._loaded:
                    break
                self.directory = self._named.with_name(f"{self._named.name}-{number}")
            raise BlockingIOError(errno.EAGAIN, "another agent uses it")

    def _open(self, stack: contextlib.ExitStack) -> int:
        path, above = self.directory, None
        if path.parent.name == f"otel_ddp-{os.geteuid()}":
            # Made by us where everybody may write: somebody may have been faster.
            above = _private(path.parent, None, "the directory above it ")
            stack.callback(os.close, above)
            path = Path(path.name)
        descriptor = _private(path, above)
        stack.callback(os.close, descriptor)
        return descriptor

    def _is_held(self, directory: int) -> bool:
        """Whether the lock on this directory is ours; it is taken if nobody has it."""
        # Compared without opening it: closing any descriptor of it would give the lock back.
        if self._held is not None:
            with contextlib.suppress(FileNotFoundError):
                there = os.stat(LOCK, dir_fd=directory, follow_symlinks=False)
                if os.path.samestat(there, os.fstat(self._held)):
                    return True
        descriptor = os.open(LOCK, _LOCK_FILE, 0o600, dir_fd=directory)
        try:
            locks.take(descriptor)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                os.close(descriptor)
                return False
            # Any other error: there are no locks here.
        if self._held is not None:
            os.close(self._held)
        self._held = descriptor
        return True

    def _make_room(self, directory: int, cost: int) -> None:
        while self._size_bytes + cost > self.limit_bytes:
            standing = (e for number, e in self._standing.items() if number not in self._kept)
            entry = (
                next(standing, None)
                or self._first(SIGNALS, spare=self._kept)
                or self._first(SIGNALS)
            )
            if entry is None:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path.name, dir_fd=directory)
            self._forget(entry)
            self._dropped["spool_full"] += entry.points

    def _first(self, signals: Iterable[Signal], spare: Set[int] = frozenset()) -> Entry | None:
        heads = (
            next((entry for number, entry in of.items() if number not in spare), None)
            for of in (self._entries[signal] for signal in signals)
        )
        return min(filter(None, heads), key=lambda entry: entry.number, default=None)

    def _remember(self, entry: Entry) -> None:
        self._entries[entry.signal][entry.number] = entry
        if not entry.lasting:
            self._standing[entry.number] = entry
        self._size_bytes += entry.size_bytes

    def _forget(self, entry: Entry) -> None:
        del self._entries[entry.signal][entry.number]
        self._standing.pop(entry.number, None)
        self._kept.discard(entry.number)
        self._size_bytes -= entry.size_bytes


def listed(directory: Path) -> list[Entry]:
    """The requests in a directory, in order, without taking hold of it; raises OSError."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        found = [_entry(directory, name, opened) for name in sorted(os.listdir(opened))]
    finally:
        os.close(opened)
    return [entry for entry in found if entry is not None]


def _entry(directory: Path, name: str, opened: int) -> Entry | None:
    """A request by the name of its file; None where that is no request."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    try:
        found = os.stat(name, dir_fd=opened, follow_symlinks=False)
    except FileNotFoundError:
        return None  # another process cleans up at this moment
    if not stat.S_ISREG(found.st_mode):
        return None
    number, points, oldest_s = int(match[1]), int(match[3]), int(match[4])
    signal: Signal = match[2]  # type: ignore[assignment]
    cost, lasting = _on_disk(found.st_size), match[5] is None
    return Entry(directory / name, number, signal, points, cost, lasting, oldest_s)


def _private(path: Path, above: int | None, who: str = "") -> int:
    """A directory, opened if it is ours; no link is followed."""
    descriptor = os.open(path, _DIRECTORY, dir_fd=above)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise PermissionError(1, f"{who}belongs to somebody else")
        if found.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _gone(path: Path) -> bool:
    """Whether a file is certainly not there: what cannot be looked at now may be later."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def _on_disk(length: int) -> int:
    return max(-(-length // BLOCK), 1) * BLOCK


def _write(directory: int, name: str, content: bytes) -> None:
    hidden = f".{name}"
    descriptor = os.open(hidden, _NEW_FILE, 0o600, dir_fd=directory)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            # A full disk may take a part and say so by a short count.
            if file.write(content) != len(content):
                raise OSError(28, "No space left on device")
        os.rename(hidden, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(hidden, dir_fd=directory)
        raise
