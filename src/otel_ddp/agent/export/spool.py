"""Keeps undelivered requests on disk, up to a limit: drops the oldest first and counts them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Literal

from otel_ddp.agent.export import spool_files
from otel_ddp.agent.export.otlp.outcome import SIGNALS, Signal
from otel_ddp.agent.export.spool_directory import SpoolDirectory
from otel_ddp.agent.export.spool_files import Entry

Loss = Literal["spool_full", "spool_error", "corrupt"]


class Spool:
    """A directory of requests in order. Nothing here raises; any thread may call."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory = SpoolDirectory(directory)
        self.limit_bytes = limit_bytes
        self.problem: str | None = None
        """Why nothing can be written at the moment; None while all is well."""
        self._lock = threading.Lock()
        # Numbers only grow, and a dict keeps the order in which they were added.
        self._entries: dict[Signal, dict[int, Entry]] = {signal: {} for signal in SIGNALS}
        self._replaceable: dict[int, Entry] = {}
        """The entries that are dropped first."""
        self._protected: set[int] = set()
        self._dropped: Counter[str] = Counter()
        self._size_bytes = 0
        self._next = 1
        # Reads only: no directory is made before there is a request for it.
        with (
            self._lock,
            self._problems(),
            contextlib.suppress(FileNotFoundError),
            self._directory.opened() as opened,
        ):
            self._load(opened)

    @property
    def directory(self) -> Path:
        """Where the files are; fixed from the first request on."""
        return self._directory.path

    @property
    def size_bytes(self) -> int:
        """How much disk the requests take."""
        return self._size_bytes

    @property
    def entries(self) -> int:
        """How many requests there are."""
        return sum(map(len, self._entries.values()))

    @property
    def dropped_points(self) -> Mapping[str, int]:
        """Points that were lost here, by reason."""
        with self._lock:
            return dict(self._dropped)

    def append(
        self,
        signal: Signal,
        body: bytes,
        points: int,
        irreplaceable: bool = True,
        oldest_s: int = 0,
    ) -> Entry | None:
        """Put a request behind all others; None if the disk does not accept it.

        A request that is not accepted does not count as lost: the caller still has it.
        """
        packed = spool_files.pack(body)
        size_bytes = spool_files.size_on_disk(len(packed))
        with self._lock:
            if size_bytes > self.limit_bytes:
                self.problem = f"a request of {size_bytes} bytes is larger than the spool"
                return None
            entry: Entry | None = None
            with self._problems():
                with self._directory.opened(make=True) as opened:
                    self._load(opened)
                    self._make_room(opened, size_bytes)
                    number = self._next
                    name = spool_files.file_name(number, signal, points, oldest_s, irreplaceable)
                    self._next += 1
                    spool_files.write(opened, name, packed)
                entry = Entry(
                    *(self.directory / name, number, signal, points),
                    *(size_bytes, irreplaceable, oldest_s),
                )
                self._add(entry)
                self.problem = None
            return entry

    def oldest(self, signal: Signal | None = None) -> Entry | None:
        """The oldest request, of one signal or of all."""
        with self._lock:
            while (entry := self._first(SIGNALS if signal is None else (signal,))) is not None:
                if not _is_missing(entry.path):
                    return entry
                # Its file was removed by another program.
                self._remove(entry)
                self._dropped["spool_error"] += entry.points
        return None

    def protect(self, entry: Entry) -> None:
        """Mark a request that is being sent: it is not dropped to make room."""
        with self._lock:
            self._protected.add(entry.number)

    def unprotect(self, entry: Entry) -> None:
        """Take the mark away: the request was not delivered."""
        with self._lock:
            self._protected.discard(entry.number)

    def remove(self, entry: Entry, lost: Loss | None = None) -> None:
        """Remove a request, because it was delivered or is lost."""
        with self._lock:
            if entry.number not in self._entries[entry.signal]:
                return
            self._remove(entry)
            if lost is not None:
                self._dropped[lost] += entry.points
            with contextlib.suppress(OSError, ValueError), self._directory.opened() as opened:
                os.unlink(entry.path.name, dir_fd=opened)

    def _load(self, opened: int) -> None:
        """Read what an earlier process left; once, as soon as the directory can be read."""
        if not self._directory.in_use:
            # All or nothing: a number that is overlooked would be given a second time.
            for entry in [self._found(opened, name) for name in sorted(os.listdir(opened))]:
                if entry is not None:
                    self._add(entry)
            self._next = max((max(of, default=0) for of in self._entries.values()), default=0) + 1
            self._directory.in_use = True

    def _found(self, opened: int, name: str) -> Entry | None:
        if spool_files.is_unfinished(name):
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=opened)
            return None
        return spool_files.read_entry(self.directory, name, opened)

    @contextlib.contextmanager
    def _problems(self) -> Iterator[None]:
        """Keep what is wrong with the directory as our problem, and raise nothing."""
        try:
            yield
        except OSError as error:
            self.problem = f"{self.directory}: {error.strerror or error}"
        except ValueError as error:
            # A name that no file can have.
            self.problem = f"{str(self.directory)!r}: {error}"

    def _make_room(self, opened: int, size_bytes: int) -> None:
        while self._size_bytes + size_bytes > self.limit_bytes:
            replaceable = (
                each for number, each in self._replaceable.items() if number not in self._protected
            )
            entry = (
                next(replaceable, None)
                or self._first(SIGNALS, without=self._protected)
                or self._first(SIGNALS)
            )
            if entry is None:
                return
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.path.name, dir_fd=opened)
            self._remove(entry)
            self._dropped["spool_full"] += entry.points

    def _first(self, signals: Iterable[Signal], without: Set[int] = frozenset()) -> Entry | None:
        firsts = (
            next((entry for number, entry in of.items() if number not in without), None)
            for of in (self._entries[signal] for signal in signals)
        )
        return min(filter(None, firsts), key=lambda entry: entry.number, default=None)

    def _add(self, entry: Entry) -> None:
        self._entries[entry.signal][entry.number] = entry
        if not entry.irreplaceable:
            self._replaceable[entry.number] = entry
        self._size_bytes += entry.size_bytes

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.signal][entry.number]
        self._replaceable.pop(entry.number, None)
        self._protected.discard(entry.number)
        self._size_bytes -= entry.size_bytes


def _is_missing(path: Path) -> bool:
    """Whether a file certainly does not exist: one that cannot be seen now may be seen later."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False
