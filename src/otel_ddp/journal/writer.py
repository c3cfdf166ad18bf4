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
# Reserved space, which definitions of names must not take: for the counters and histograms of the
# process (at most 48, with 5 kB and 79 slots), and for a second identity document, which is written
# once the run's name is known.
_TOTALS_BYTES = 6 * 1024
_TOTALS_SLOTS = 128
_LEARNED_BYTES = 2 * 1024
# Constants of `layout`, copied into this module: looking them up there costs time in each step.
_RING_WORD = layout.RING_POSITION // 8
_SCALARS = layout.SCALARS


open_journals: set[Path] = set()
"""The journals that this process writes. It must not query their locks: this would drop them."""


class Gate:
    """Lets one thread at a time write to a journal. Refuses the call of a signal handler that
    interrupts a write of its own thread.

    The attributes are no properties, since `quick_log` reads them on the hot path.
    """

    def __init__(self) -> None:
        # `Progress` uses this lock too. With a lock of its own, two threads that take both locks in
        # opposite order would deadlock.
        self.lock = threading.RLock()
        self.inside = False
        self.closed = False
        self.deferred: Callable[[], None] | None = None
        # How many calls of signal handlers were refused, and are not counted in the journal yet.
        self.interrupted = 0
        # When to check next whether an agent runs; 0, i.e. at once, after a refused call.
        self.check_due_ns = 0
        # `logs`: the number of `log` calls on the hot path. `log_ns`: the time of all `log` calls.
        # On the hot path only one call in 64 is timed, and its time is multiplied by 64.
        self.logs = self.log_ns = 0

    def write(self, act: Callable[[], T], default: D) -> T | D:
        """Call *act*, which writes to the journal, and return its result. Returns *default* instead
        if the journal is closed, or if this call interrupts another write."""
        with self.lock:
            if self.closed:
                return default
            if self.inside:
                # This is a signal handler that interrupts a write of the same thread. The reentrant
                # lock lets it pass, but a second write would damage the first one. Count the call.
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
        """Return whether this call interrupts a write. If so, *act* runs right after that write."""
        with self.lock:
            if self.inside:
                self.deferred = act
            return self.inside


class Shape:
    """The layout of the records of `log` calls with the same names. It is prepared once, so that a
    call only has to pack its values."""

    __slots__ = ("counts", "head", "ids", "latest", "latest_word", "pack", "seen", "size")

    def __init__(self, ids: Sequence[int]) -> None:
        count = len(ids)
        packed = struct.pack(f"<{count}I", *ids)
        packed += bytes(padded(len(packed)) - len(packed))
        self.ids = packed
        self.size = RECORD.size + SCALARS_HEAD.size + len(packed) + 8 * count
        # Fields: size, type and flags; sequence number; count and a reserved field; time, step,
        # epoch; the numbers of the names; the values.
        self.pack = struct.Struct(f"<8sI8sqqd{len(packed)}s{count}d").pack
        self.head = struct.pack("<IHH", self.size, _SCALARS, 0)
        self.counts = struct.pack("<II", count, 0)
        # Where the latest record with these names is stored: its slice of the file, and the index
        # of the word with its position in the ring.
        self.latest: slice | None = None
        self.latest_word = 0
        self.seen = False


class _Definitions:
    """Writes the definitions, which are never overwritten. Each kind has a limit, so that one kind
    does not fill the area."""

    def __init__(self, writer: JournalWriter, identity: bytes) -> None:
        self._writer = writer
        self._used = 0
        self.define(layout.IDENTITY, identity)
        self.left = self._shares()
        # A sixteenth of the area is reserved for counters, of which each name of a value needs one.
        self._reserve = writer.areas.definitions[1] // 16
        self._names = 0
        self._totals = 0

    def _shares(self) -> dict[int, int]:
        """The limit in bytes of each kind of definition of which a program may write any number."""
        room = self._writer.areas.definitions[1]
        config, facts = self._writer.areas.latest[1] // 4, max(4096, room // 16)
        kept = 2 * self._used + _LEARNED_BYTES + _TOTALS_BYTES
        # Names get at least an eighth of the area, even if the identity nearly fills it.
        names = max(room // 8, room - kept - config - facts)
        return {layout.NAME: names, layout.CONFIG: config, layout.FACTS: facts}

    def within(self, share: int, kind: int, payload: bytes, leave: int = 0) -> bool:
        size = padded(RECORD.size + len(payload))
        if size > self.left[share] - leave or not self.define(kind, payload):
            return False
        self.left[share] -= size
        return True

    def define(self, kind: int, payload: bytes) -> bool:
        """Append a definition; False if the area is full."""
        start, room = self._writer.areas.definitions
        size = padded(RECORD.size + len(payload))
        if self._used + size > room:
            return False
        self._writer.put(start + self._used, self._used, size, kind, payload, 0)
        self._used += size
        self._writer.words[layout.DEFINITIONS_POSITION // 8] = self._used
        return True

    def name(self, name: bytes, split: bytes) -> int:
        """Define the name of a value, and its split, such as `val`; returns its number, or 0 if
        there is no room."""
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
    """Writes one journal. It has no lock itself: callers must hold one around each call."""

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
                # Allocate all blocks now: otherwise, if the tmpfs is full later, a write to a new
                # block would end the training by SIGBUS.
                os.posix_fallocate(self._fd, 0, size)
                # `mmap` duplicates the descriptor, so `close` has to close two descriptors.
                self.mapped = mmap.mmap(self._fd, size)
            # The lock shows that this process lives: the kernel drops it when the process dies, and
            # children do not inherit it.
            files.lock(self._fd)
            self._start(size, identity)
            # Make the file read-only, so that no program truncates it by mistake.
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
        """Append a record with the values of one `log` call. Also copy it into the area of latest
        values, in place of the previous record with the same names."""
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
        # Advance the sequence number only now: if packing raises, there is no record with this
        # number, which readers would count as lost.
        self.number = number
        self.position = self.words[_RING_WORD] = position + size
        if shape.latest is not None:
            self.words[shape.latest_word] = position
            self.mapped[shape.latest] = record
        elif not shape.seen:
            self._first_latest(shape, position, record)

    def append(self, kind: int, payload: bytes) -> bool:
        """Append a record of any kind but SCALARS; False if it is too large for the ring."""
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
        # Fill the rest of the ring with a PAD record. If not even its head fits, write none: the
        # reader skips such a rest too.
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
        """Define a name with its split; returns the name's number, or 0 if there is no room."""
        return self.definitions.name(_cut(text, 60_000), _cut(split, 1000))

    def document(self, kind: int, content: Mapping[str, Any]) -> bool:
        """Write a document: an IDENTITY, which replaces the earlier one, or a CONFIG or FACTS,
        which adds to the earlier ones. Returns False if there is no room."""
        payload = _json(content)
        if kind in self.definitions.left:
            return self.definitions.within(kind, kind, payload)
        return self.definitions.define(kind, payload)

    # -- totals

    def counter(
        self, metric: str, attributes: Mapping[str, str] | None = None, of_name: bool = False
    ) -> int:
        """Define a counter; returns its slot in the totals area, or -1 if no slot is left.

        *of_name*: whether such a counter exists once per name of a value. There may be many of
        them, so they must leave the reserved slots to other totals.
        """
        content = {"metric": metric, "attributes": dict(attributes or {})}
        return self.definitions.total(layout.COUNTER, 1, content, of_name)

    def histogram(self, metric: str, bounds: Sequence[float]) -> int:
        """Define a histogram; returns its first slot, or -1 if too few slots are left.

        The first slot has the sum, and the following ones have the count of each bucket.
        """
        content = {"metric": metric, "attributes": {}, "bounds": list(bounds)}
        return self.definitions.total(layout.HISTOGRAM, len(bounds) + 2, content, False)

    def add(self, index: int, amount: float) -> None:
        """Add to the total in this slot; nothing if the slot is -1."""
        if index >= 0:
            self.totals[index] += amount

    def set(self, index: int, value: float) -> None:
        """Set the total in this slot, e.g. to a timestamp; nothing if the slot is -1."""
        if index >= 0:
            self.totals[index] = value

    # -- progress

    # Each word needs no lock and no checksum: it is written by one aligned store, which is atomic.

    def phase(self, code: int, name: int, since_ns: int) -> None:
        """Write the phase and its start. *name*: the number of the user's name for it, else 0.

        The time counts from the creation of the journal. So hooks, which write these words
        themselves in every step, can add code and time in a single addition.
        """
        self.words[layout.PHASE_NAME // 8] = name
        self.words[layout.PHASE // 8] = code << layout.CODE_SHIFT | since_ns

    def step(self, number: int) -> None:
        """Write the number of the last step; -1 if there was no step yet."""
        self.words[layout.STEP // 8] = number + 1

    def expect_ms(self, milliseconds: int) -> None:
        """Write how long the current phase should last, as the user expects; 0 if not given."""
        self.words[layout.EXPECT_MS // 8] = milliseconds

    def state(self, code: int, since_us: int) -> None:
        """Write the state. Before the first state, callers must write phase and step: readers take
        these words as valid once there is a state."""
        self.words[layout.STATE // 8] = code << layout.CODE_SHIFT | since_us

    def reason(self, text: str) -> None:
        """Write why the run ended."""
        encoded = _cut(text, layout.REASON_BYTES - layout.REASON_HEAD.size)
        head = layout.REASON_HEAD.pack(len(encoded), checksum(encoded, layout.REASON))
        self.mapped[layout.REASON : layout.REASON + len(head) + len(encoded)] = head + encoded

    # -- the end

    def overwrites_unread(self) -> bool:
        """Whether the ring is so full that new records overwrite records that no agent has read."""
        if self.position <= self.ring_bytes:
            return False
        return self.position - self.agent_position() > self.ring_bytes

    def agent_position(self) -> int:
        """The ring position up to which an agent has delivered records; 0 if it stored none yet."""
        taken = layout.read_taken(self.path.with_suffix(layout.TAKEN_SUFFIX))
        return 0 if taken is None else taken[0]

    def close(self) -> None:
        """Close the file, but leave it to the agent, which deletes it. Not to be called in a forked
        child."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        totals, self.totals = self.totals, memoryview(bytearray(self.areas.totals[1])).cast("d")
        totals.release()
        words, self.words = self.words, scratch_words()
        words.release()
        # Check that both descriptors still belong to the journal. Python does not expose the map's
        # descriptor, so compare the size of the map with the size of the file behind it.
        if file_of(fd) == self._file and _still_has_its_file(self.mapped):
            self.mapped.close()
        else:
            # Other code has closed our descriptors, and their numbers may be in use again. To unmap
            # would close such a descriptor of other code, so never unmap, not even at exit.
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
    """Memory into which late hooks write, without effect, after the journal was closed."""
    return memoryview(bytearray(layout.HEAD_BYTES)).cast("Q")


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _cut(text: str, most_bytes: int) -> bytes:
    # Cut between two characters: half a character would be unreadable.
    encoded = text.encode("utf-8", "replace")
    return encoded[:most_bytes].decode("utf-8", "ignore").encode()


def _start_ticks() -> int:
    # The start time is stored with the pid, since the pid alone may be reused by another process.
    stat = files.stat_fields(Path("/proc/self"))
    return int(stat[19]) if len(stat) > 19 else 0
