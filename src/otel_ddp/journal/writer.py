"""Writes the journal of a process: only to memory, without waiting or failing once it is open."""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from otel_ddp import files
from otel_ddp.files import close_ours, file_of, off_standard_streams
from otel_ddp.journal import layout
from otel_ddp.journal.layout import (
    LATEST_HEAD,
    RECORD,
    SCALARS_HEAD,
    checksum,
    largest_record,
    padded,
)

T = TypeVar("T")
D = TypeVar("D")

_SLOT = LATEST_HEAD.size
# Space in the definitions area that names must not take: for the counters and histograms of a
# process (at most 48, with 5 kB and 79 slots), and for a second identity document, written when the
# run's name is known.
_TOTALS_BYTES = 6 * 1024
_TOTALS_SLOTS = 128
_LEARNED_BYTES = 2 * 1024
# Copied into this module, as lookups in another module cost time in each step.
_RING_WORD = layout.RING_POSITION // 8
_SCALARS = layout.SCALARS


open_journals: set[Path] = set()
"""The journals of this process. Querying the lock of one from this process would drop that lock."""


class Gate:
    """Lets one thread at a time write to a journal, and refuses a signal handler that interrupts a
    write.

    The attributes are plain, as `quick_log` reads them on the hot path.
    """

    def __init__(self) -> None:
        # `Progress` shares this lock: with a second lock, threads that take both in opposite order
        # would deadlock.
        self.lock = threading.RLock()
        self.inside = False
        self.closed = False
        self.deferred: Callable[[], None] | None = None
        # Number of refused calls of signal handlers that no counter includes yet.
        self.interrupted = 0
        # When the next check of the agent is due: immediately if a signal handler was refused.
        self.check_due_ns = 0
        # Number of `log` calls on the hot path, and the time of all `log` calls. On the hot path,
        # one call in 64 is timed, and its time multiplied by 64.
        self.logs = self.log_ns = 0

    def write(self, act: Callable[[], T], default: D) -> T | D:
        """Write to the journal, unless it is closed or this call interrupts another write."""
        with self.lock:
            if self.closed:
                return default
            if self.inside:
                # We are in a signal handler that interrupts a write of the same thread. The lock is
                # reentrant, but a second write would damage the first. The call is counted later.
                self.interrupted += 1
                self.check_due_ns = 0
                return default
            self.inside = True
            try:
                return act()
            finally:
                self.inside = False
                if (deferred := self.deferred) is not None:
                    self.deferred = None
                    deferred()

    def defer(self, act: Callable[[], None]) -> bool:
        """Whether this call interrupts a write; if so, *act* runs right after that write."""
        with self.lock:
            if self.inside:
                self.deferred = act
            return self.inside


class Shape:
    """The record layout of all `log` calls with the same names, prepared once."""

    __slots__ = ("counts", "head", "ids", "latest", "latest_word", "pack", "seen", "size")

    def __init__(self, ids: Sequence[int]) -> None:
        count = len(ids)
        packed = struct.pack(f"<{count}I", *ids)
        packed += bytes(padded(len(packed)) - len(packed))
        self.ids = packed
        self.size = RECORD.size + SCALARS_HEAD.size + len(packed) + 8 * count
        # size, type, flags; number; count, reserved; time, step, epoch, ids, values
        self.pack = struct.Struct(f"<8sI8sqqd{len(packed)}s{count}d").pack
        self.head = struct.pack("<IHH", self.size, _SCALARS, 0)
        self.counts = struct.pack("<II", count, 0)
        # The slice of the file with the latest record, and the word with its position.
        self.latest: slice | None = None
        self.latest_word = 0
        self.seen = False


class _Definitions:
    """Writes the definitions, which are never overwritten, with a limit for each of their kinds."""

    def __init__(self, writer: JournalWriter, identity: bytes) -> None:
        self._writer = writer
        self._used = 0
        self.define(layout.IDENTITY, identity)
        self.left = self._shares()
        # The last sixteenth of the definitions is reserved for counters per name.
        self._reserve = writer.areas.definitions[1] // 16
        self._names = 0
        self._totals = 0

    def _shares(self) -> dict[int, int]:
        """The space for each kind of definition that a program can write in any number."""
        room = self._writer.areas.definitions[1]
        config, facts = self._writer.areas.latest[1] // 4, max(4096, room // 16)
        kept = 2 * self._used + _LEARNED_BYTES + _TOTALS_BYTES
        # If the identity nearly fills the area, there is still room for the first names.
        names = max(room // 8, room - kept - config - facts)
        return {layout.NAME: names, layout.CONFIG: config, layout.FACTS: facts}

    def within(self, share: int, kind: int, payload: bytes, leave: int = 0) -> bool:
        size = padded(RECORD.size + len(payload))
        if size > self.left[share] - leave or not self.define(kind, payload):
            return False
        self.left[share] -= size
        return True

    def define(self, kind: int, payload: bytes) -> bool:
        """Append to the area that is never overwritten; False if it is full."""
        start, room = self._writer.areas.definitions
        size = padded(RECORD.size + len(payload))
        if self._used + size > room:
            return False
        self._writer.put(start + self._used, self._used, size, kind, payload, 0)
        self._used += size
        self._writer.words[layout.DEFINITIONS_POSITION // 8] = self._used
        return True

    def name(self, name: bytes, split: bytes) -> int:
        """Assign a number to a name; 0 if there is no room."""
        number = self._names + 1
        payload = layout.NAME_HEAD.pack(number, len(name), len(split)) + name + split
        if not self.within(layout.NAME, layout.NAME, payload, self._reserve):
            return 0
        self._names = number
        return number

    def total(self, kind: int, slots: int, content: Mapping[str, Any], of_name: bool) -> int:
        index = self._totals
        if index + slots > len(self._writer.totals) - (_TOTALS_SLOTS if of_name else 0):
            return -1
        payload = _json({"index": index, **content})
        defined = self.within(layout.NAME, kind, payload) if of_name else self.define(kind, payload)
        if not defined:
            return -1
        self._totals += slots
        return index


class JournalWriter:
    """Writes one journal. Callers must hold a lock around each call."""

    def __init__(self, directory: Path, size: int, identity: Mapping[str, Any]) -> None:
        size -= size % 8
        self.areas = layout.areas(size)
        self.journal_id = os.urandom(16)
        self.created_ns = time.time_ns()
        self.created_monotonic_ns = time.monotonic_ns()
        self.path = directory / f"{os.getpid()}-{self.journal_id[:4].hex()}{layout.SUFFIX}"
        hidden = directory / f".{self.path.name}"
        self._fd = -1
        try:
            with off_standard_streams():
                self._fd = files.create(hidden)
                self._file = file_of(self._fd)
                # Allocate all blocks now: a hole in a full tmpfs would be a SIGBUS later.
                os.posix_fallocate(self._fd, 0, size)
                # `mmap` duplicates the descriptor, so `close` has two descriptors to close.
                self.mapped = mmap.mmap(self._fd, size)
            # The kernel drops this lock when the process dies; children do not inherit it.
            files.lock(self._fd)
            self._start(size, identity)
            # Read-only, so that no program truncates it by mistake.
            os.fchmod(self._fd, 0o400)
            with files.own_directory(directory) as folder:
                os.rename(hidden.name, self.path.name, src_dir_fd=folder, dst_dir_fd=folder)
            open_journals.add(self.path)
        except BaseException:
            files.remove(hidden)
            if self._fd >= 0:
                os.close(self._fd)
            raise

    def _start(self, size: int, identity: Mapping[str, Any]) -> None:
        areas = self.areas
        fixed = layout.FIXED.pack(
            layout.MAGIC,
            layout.VERSION,
            layout.HEAD_BYTES,
            size,
            *chain(*areas),
            os.getpid(),
            _start_ticks(),
            0,
            self.created_ns,
            self.created_monotonic_ns,
            self.journal_id,
        )
        self.mapped[: len(fixed)] = fixed
        self.mapped[len(fixed) : len(fixed) + 4] = layout.FIXED_CRC.pack(checksum(fixed, 0))
        words = memoryview(self.mapped)
        self.words = words.cast("Q")
        start, length = areas.totals
        self.totals = words[start : start + length].cast("d")
        self.ring_start, self.ring_bytes = areas.ring
        self.position = 0
        self.number = 0
        self.definitions = _Definitions(self, _json(identity))

    # -- the ring

    def scalars(self, shape: Shape, time_ns: int, step: int, epoch: float, values: Any) -> None:
        """Append one `log` call, and store a copy as the latest one with these names."""
        size = shape.size
        position = self.position
        ring = self.ring_bytes
        offset = position % ring
        if offset + size > ring:
            position = self._pad(position, ring - offset)
            offset = 0
        number = (self.number + 1) & 0xFFFFFFFF
        body = shape.pack(
            shape.head, number, shape.counts, time_ns, step, epoch, shape.ids, *values
        )
        record = checksum(body, position).to_bytes(4, "little") + body
        start = self.ring_start + offset
        self.mapped[start : start + size] = record
        # Advance the sequence number only now: if packing raises, no record counts as lost.
        self.number = number
        self.position = self.words[_RING_WORD] = position + size
        if shape.latest is not None:
            self.words[shape.latest_word] = position
            self.mapped[shape.latest] = record
        elif not shape.seen:
            self._first_latest(shape, position, record)

    def append(self, kind: int, payload: bytes) -> bool:
        """Append a record of a kind that has no method of its own; False if it exceeds the ring."""
        size = padded(RECORD.size + len(payload))
        if size > largest_record(self.ring_bytes):
            return False
        position = self.position
        offset = position % self.ring_bytes
        if offset + size > self.ring_bytes:
            position = self._pad(position, self.ring_bytes - offset)
            offset = 0
        self.number = (self.number + 1) & 0xFFFFFFFF
        self.put(self.ring_start + offset, position, size, kind, payload, self.number)
        self.position = position + size
        self.words[layout.RING_POSITION // 8] = self.position
        return True

    def _pad(self, position: int, room: int) -> int:
        # If not even the head of a record fits, writer and reader both continue at the next lap.
        if room >= RECORD.size:
            at = self.ring_start + position % self.ring_bytes
            self.put(at, position, room, layout.PAD, b"", self.number)
        return position + room

    def put(
        self, at: int, position: int, size: int, kind: int, payload: bytes, number: int
    ) -> None:
        body = RECORD.pack(0, size, kind, 0, number)[4:] + payload
        if kind != layout.PAD:
            body += bytes(size - 4 - len(body))
        self.mapped[at : at + 4 + len(body)] = checksum(body, position).to_bytes(4, "little") + body

    def _first_latest(self, shape: Shape, position: int, record: bytes) -> None:
        shape.seen = True
        start, room = self.areas.latest
        need = _SLOT + len(record)
        used = self.words[layout.LATEST_POSITION // 8]
        if used + need > room:
            return
        at = start + used
        head = LATEST_HEAD.pack(len(record), len(record) ^ 0xFFFFFFFF, position)
        self.mapped[at : at + need] = head + record
        shape.latest = slice(at + _SLOT, at + need)
        shape.latest_word = (at + _SLOT - 8) // 8
        self.words[layout.LATEST_POSITION // 8] = used + need

    # -- definitions

    def name(self, text: str, split: str = "") -> int:
        """Assign a number to a name; 0 if there is no room."""
        return self.definitions.name(_cut(text, 60_000), _cut(split, 1000))

    def document(self, kind: int, content: Mapping[str, Any]) -> bool:
        """Write an IDENTITY, which replaces the earlier one, or a CONFIG or FACTS document, which
        extends the earlier ones."""
        payload = _json(content)
        if kind in self.definitions.left:
            return self.definitions.within(kind, kind, payload)
        return self.definitions.define(kind, payload)

    # -- totals

    def counter(
        self, metric: str, attributes: Mapping[str, str] | None = None, of_name: bool = False
    ) -> int:
        """The slot of a new counter; -1 if none is left.

        *of_name*: whether there is such a counter for each name of a value; these must not take the
        reserved slots.
        """
        content = {"metric": metric, "attributes": dict(attributes or {})}
        return self.definitions.total(layout.COUNTER, 1, content, of_name)

    def histogram(self, metric: str, bounds: Sequence[float]) -> int:
        """The slot of a new histogram: its sum, then a slot per bucket; -1 if none is left."""
        content = {"metric": metric, "attributes": {}, "bounds": list(bounds)}
        return self.definitions.total(layout.HISTOGRAM, len(bounds) + 2, content, False)

    def add(self, index: int, amount: float) -> None:
        """Add to a total."""
        if index >= 0:
            self.totals[index] += amount

    def set(self, index: int, value: float) -> None:
        """Overwrite a total, as for a timestamp."""
        if index >= 0:
            self.totals[index] = value

    # -- progress

    # Each word is written by one aligned store, which is atomic: no lock or checksum is needed.

    def phase(self, code: int, name: int, since_ns: int) -> None:
        """Write the phase and its start; *name*: the number of the user's name for it, else 0.

        The time counts from the creation of the journal, so that hooks, which write these words
        themselves in every step, need a single addition.
        """
        self.words[layout.PHASE_NAME // 8] = name
        self.words[layout.PHASE // 8] = code << layout.CODE_SHIFT | since_ns

    def step(self, number: int) -> None:
        """Write the last step; -1 if there is none yet."""
        self.words[layout.STEP // 8] = number + 1

    def expect_ms(self, milliseconds: int) -> None:
        """Write how long the user expects the phase to last; 0 if unknown."""
        self.words[layout.EXPECT_MS // 8] = milliseconds

    def state(self, code: int, since_us: int) -> None:
        """Write the state. Callers write phase and step first: readers wait for the first state."""
        self.words[layout.STATE // 8] = code << layout.CODE_SHIFT | since_us

    def reason(self, text: str) -> None:
        """Write why the run ended."""
        encoded = _cut(text, layout.REASON_BYTES - layout.REASON_HEAD.size)
        head = layout.REASON_HEAD.pack(len(encoded), checksum(encoded, layout.REASON))
        self.mapped[layout.REASON : layout.REASON + len(head) + len(encoded)] = head + encoded

    # -- the end

    def overwrites_unread(self) -> bool:
        """Whether new records overwrite records that no agent has read."""
        if self.position <= self.ring_bytes:
            return False
        return self.position - self.agent_position() > self.ring_bytes

    def agent_position(self) -> int:
        """The ring position up to which the agent has delivered records; 0 if it has not begun."""
        taken = layout.read_taken(self.path.with_suffix(layout.TAKEN_SUFFIX))
        return 0 if taken is None else taken[0]

    def close(self) -> None:
        """Close the file, which remains for the agent. A forked child does not call this."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        totals, self.totals = self.totals, memoryview(bytearray(self.areas.totals[1])).cast("d")
        totals.release()
        words, self.words = self.words, scratch_words()
        words.release()
        # Python does not expose the map's own descriptor, only the size of the file behind it.
        if file_of(fd) == self._file and _still_has_its_file(self.mapped):
            self.mapped.close()
        else:
            # Other code has closed our descriptors and may have reused their numbers. Unmapping
            # would close one of them, so the map is leaked, even at exit.
            import ctypes

            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.mapped))
        close_ours(fd, self._file)
        open_journals.discard(self.path)


def _still_has_its_file(mapped: mmap.mmap) -> bool:
    try:
        return mapped.size() == len(mapped)
    except OSError:
        return False


def scratch_words() -> memoryview[int]:
    """Memory that takes late writes after a journal is closed."""
    return memoryview(bytearray(layout.HEAD_BYTES)).cast("Q")


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _cut(text: str, most_bytes: int) -> bytes:
    # Cut between characters, as half a character would count as damage.
    encoded = text.encode("utf-8", "replace")
    return encoded[:most_bytes].decode("utf-8", "ignore").encode()


def _start_ticks() -> int:
    # Pid and start time identify a process; the pid alone may be reused.
    stat = files.stat_fields(Path("/proc/self"))
    return int(stat[19]) if len(stat) > 19 else 0
