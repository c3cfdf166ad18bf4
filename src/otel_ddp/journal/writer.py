"""Writes one process's journal: memory only, no waiting, nothing that can fail after opening."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from otel_ddp.journal import layout, locks
from otel_ddp.journal.layout import (
    LATEST_HEAD,
    MOST_VALUES,
    NO_STEP,
    RECORD,
    SCALARS_HEAD,
    checksum,
    largest_record,
    padded,
)
from otel_ddp.journal.locks import lock_holder
from otel_ddp.journal.ownership import close_ours, file_of
from otel_ddp.journal.reader import JournalReader, Unreadable

_SLOT = LATEST_HEAD.size
# However many names there are, these find room: each counter and histogram that one process has
# (48 of 5 kB and 79 places, if all come together), and an identity that has learned its run's name.
_TOTALS_BYTES = 6 * 1024
_TOTALS_SLOTS = 128
_LEARNED_BYTES = 2 * 1024
# On the quick way even looking them up in another module is felt.
_RING_WORD = layout.RING_POSITION // 8
_SCALARS = layout.SCALARS
_CODE_SHIFT = layout.CODE_SHIFT
_PHASE_WORD = layout.PHASE // 8
_PHASE_NAME_WORD = layout.PHASE_NAME // 8
_STEP_WORD = layout.STEP // 8
_EXPECT_MS_WORD = layout.EXPECT_MS // 8
_STATE_WORD = layout.STATE // 8


# The journals of this process that are open: to ask for the lock of one would be to drop it.
_open_journals: set[Path] = set()


class Shape:
    """What never changes between two calls of `log` with the same names, worked out once."""

    __slots__ = ("counts", "head", "ids", "latest", "latest_word", "pack", "parts", "seen", "size")

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
        # Where the copy of the latest record lies in the file, and the word of its position.
        self.latest: slice | None = None
        self.latest_word = 0
        self.seen = False
        self.parts: list[Shape] = []
        if count > MOST_VALUES:
            # Larger than every ring, so that only the rare branch of `scalars` meets it.
            self.size = 2**62
            self.parts = [Shape(ids[at : at + MOST_VALUES]) for at in range(0, count, MOST_VALUES)]


class JournalWriter:
    """One journal, one process, one writer. Callers hold a lock around each call."""

    def __init__(self, directory: Path, size: int, identity: Mapping[str, Any]) -> None:
        size -= size % 8
        self._areas = layout.areas(size)
        self.journal_id = os.urandom(16)
        self.created_ns = time.time_ns()
        self.created_monotonic_ns = time.monotonic_ns()
        self.path = directory / f"{os.getpid()}-{self.journal_id[:4].hex()}{layout.SUFFIX}"
        hidden = directory / f".{self.path.name}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        self._fd = -1
        try:
            self._fd = os.open(hidden, flags, 0o600)
            self._file = file_of(self._fd)
            # Every block now, or not at all: a hole in a full tmpfs is a SIGBUS later on.
            os.posix_fallocate(self._fd, 0, size)
            self.mapped = mmap.mmap(self._fd, size)
            # The kernel drops this lock when we die, whatever kills us; no child inherits it.
            locks.acquire(self._fd)
            self._start(size, identity)
            # Read-only from here on for everyone who opens it: nobody truncates it by mistake.
            os.fchmod(self._fd, 0o400)
            os.rename(hidden, self.path)
            _open_journals.add(self.path)
        except BaseException:
            hidden.unlink(missing_ok=True)
            if self._fd >= 0:
                os.close(self._fd)
            raise

    def _start(self, size: int, identity: Mapping[str, Any]) -> None:
        areas = self._areas
        fixed = layout.FIXED.pack(
            layout.MAGIC,
            layout.VERSION,
            layout.HEAD_BYTES,
            size,
            *areas.definitions,
            *areas.totals,
            *areas.latest,
            *areas.ring,
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
        self._totals = words[start : start + length].cast("d")
        self._step_duration = words[layout.STEP_DURATION : layout.STEP_DURATION + 8].cast("d")
        self.ring_start, self.ring_bytes = areas.ring
        self.position = 0
        self.number = 0
        self._defined = 0
        self._latest_used = 0
        self._totals_used = 0
        self._names = 0
        self.define(layout.IDENTITY, _json(identity))
        self._left = self._shares()
        # The last of it is for what is counted of a name.
        self._names_reserve = self._areas.definitions[1] // 16

    # -- the ring

    def scalars(self, shape: Shape, time_ns: int, step: int, epoch: float, values: Any) -> None:
        """Append one `log` call, and keep a copy as the latest of its shape.

        `recording/quick_log.py` does the same by itself for most calls.
        """
        size = shape.size
        position = self.position
        ring = self.ring_bytes
        offset = position % ring
        if offset + size > ring:
            if shape.parts:
                return self._in_parts(shape, time_ns, step, epoch, values)
            position = self._pad(position, ring - offset)
            offset = 0
        number = (self.number + 1) & 0xFFFFFFFF
        body = shape.pack(
            shape.head, number, shape.counts, time_ns, step, epoch, shape.ids, *values
        )
        record = checksum(body, position).to_bytes(4, "little") + body
        start = self.ring_start + offset
        self.mapped[start : start + size] = record
        # Counted once it is written: a value that does not pack was not lost.
        self.number = number
        self.position = self.words[_RING_WORD] = position + size
        if shape.latest is not None:
            self.words[shape.latest_word] = position
            self.mapped[shape.latest] = record
        elif not shape.seen:
            self._first_latest(shape, position, record)
        return None

    def _in_parts(
        self, shape: Shape, time_ns: int, step: int, epoch: float, values: Iterable[float]
    ) -> None:
        numbers = iter([float(value) for value in values])
        for part in shape.parts:
            self.scalars(part, time_ns, step, epoch, list(islice(numbers, MOST_VALUES)))

    def append(self, kind: int, payload: bytes) -> bool:
        """Append any other record to the ring; False if it is larger than a record may be."""
        size = padded(RECORD.size + len(payload))
        if size > largest_record(self.ring_bytes):
            return False
        position = self.position
        offset = position % self.ring_bytes
        if offset + size > self.ring_bytes:
            position = self._pad(position, self.ring_bytes - offset)
            offset = 0
        self.number = (self.number + 1) & 0xFFFFFFFF
        self._put(self.ring_start + offset, position, size, kind, payload, self.number)
        self.position = position + size
        self.words[layout.RING_POSITION // 8] = self.position
        return True

    def _pad(self, position: int, room: int) -> int:
        # Where not even a record's head fits, both sides know to skip to the next lap.
        if room >= RECORD.size:
            self._put(
                self.ring_start + position % self.ring_bytes,
                position,
                room,
                layout.PAD,
                b"",
                self.number,
            )
        return position + room

    def _put(
        self, at: int, position: int, size: int, kind: int, payload: bytes, number: int
    ) -> None:
        body = RECORD.pack(0, size, kind, 0, number)[4:] + payload
        if kind != layout.PAD:
            body += bytes(size - 4 - len(body))
        self.mapped[at : at + 4 + len(body)] = checksum(body, position).to_bytes(4, "little") + body

    def _first_latest(self, shape: Shape, position: int, record: bytes) -> None:
        shape.seen = True
        start, room = self._areas.latest
        need = _SLOT + len(record)
        if self._latest_used + need > room:
            return
        at = start + self._latest_used
        head = LATEST_HEAD.pack(len(record), len(record) ^ 0xFFFFFFFF, position)
        self.mapped[at : at + need] = head + record
        shape.latest = slice(at + _SLOT, at + need)
        shape.latest_word = (at + _SLOT - 8) // 8
        self._latest_used += need
        self.words[layout.LATEST_POSITION // 8] = self._latest_used

    # -- what is said once

    def _shares(self) -> dict[int, int]:
        """How many bytes each kind may take of which there may be any number."""
        room = self._areas.definitions[1]
        config, facts = self._areas.latest[1] // 4, max(4096, room // 16)
        kept = 2 * self._defined + _LEARNED_BYTES + _TOTALS_BYTES
        # Where an identity fills the area nearly by itself, a run is still worth its first values.
        names = max(room // 8, room - kept - config - facts)
        return {layout.NAME: names, layout.CONFIG: config, layout.FACTS: facts}

    def _define_within(self, share: int, kind: int, payload: bytes, leave: int = 0) -> bool:
        size = padded(RECORD.size + len(payload))
        if size > self._left[share] - leave or not self.define(kind, payload):
            return False
        self._left[share] -= size
        return True

    def define(self, kind: int, payload: bytes) -> bool:
        """Append to the area that is never overwritten; False if it is full."""
        start, room = self._areas.definitions
        size = padded(RECORD.size + len(payload))
        if self._defined + size > room:
            return False
        self._put(start + self._defined, self._defined, size, kind, payload, 0)
        self._defined += size
        self.words[layout.DEFINITIONS_POSITION // 8] = self._defined
        return True

    def name(self, text: str, split: str = "") -> int:
        """Give a name its number; 0 if there is no room for one more."""
        name, word = _cut(text, 60_000), _cut(split, 1000)
        number = self._names + 1
        head = layout.NAME_HEAD.pack(number, len(name), len(word))
        payload = head + name + word
        if not self._define_within(layout.NAME, layout.NAME, payload, self._names_reserve):
            return 0
        self._names = number
        return number

    def document(self, kind: int, content: Mapping[str, Any]) -> bool:
        """Write an IDENTITY, CONFIG or FACTS document; a later one replaces or completes it."""
        payload = _json(content)
        if kind in self._left:
            return self._define_within(kind, kind, payload)
        return self.define(kind, payload)

    # -- totals

    def counter(
        self, metric: str, attributes: Mapping[str, str] | None = None, of_name: bool = False
    ) -> int:
        """The place of a new cumulative total; -1 if there is none left.

        With *of_name* it is one that each name may have, and takes no room from the others.
        """
        return self._claim(layout.COUNTER, metric, attributes or {}, 1, {}, of_name)

    def histogram(
        self, metric: str, bounds: Sequence[float], attributes: Mapping[str, str] | None = None
    ) -> int:
        """The place of a new histogram: its sum, then one total a bucket; -1 if none is left."""
        return self._claim(
            layout.HISTOGRAM, metric, attributes or {}, len(bounds) + 2, {"bounds": list(bounds)}
        )

    def _claim(
        self,
        kind: int,
        metric: str,
        attributes: Mapping[str, str],
        places: int,
        more: Any,
        of_name: bool = False,
    ) -> int:
        index = self._totals_used
        if index + places > len(self._totals) - (_TOTALS_SLOTS if of_name else 0):
            return -1
        content = {"index": index, "metric": metric, "attributes": dict(attributes), **more}
        payload = _json(content)
        defined = (
            self._define_within(layout.NAME, kind, payload)
            if of_name
            else self.define(kind, payload)
        )
        if not defined:
            return -1
        self._totals_used += places
        return index

    def add(self, index: int, amount: float) -> None:
        """Raise a total."""
        if index >= 0:
            self._totals[index] += amount

    def set(self, index: int, value: float) -> None:
        """Overwrite a total that is a time stamp."""
        if index >= 0:
            self._totals[index] = value

    # -- progress

    # One aligned store each: right at any moment, so neither a lock nor a checksum is needed.

    def phase(self, code: int, name: int, since_ns: int) -> None:
        """Say what the process is busy with, and since when; *name* is 0 where the code says it.

        Counted from the making of the journal: on the way of every step, where this is done by
        who holds the words itself, it is one addition.
        """
        words = self.words
        words[_PHASE_NAME_WORD] = name
        words[_PHASE_WORD] = code << _CODE_SHIFT | since_ns

    def step(self, number: int) -> None:
        """Say which step was the last one; -1: none yet."""
        self.words[_STEP_WORD] = number + 1

    def expect_ms(self, milliseconds: int) -> None:
        """Say how long the phase will last, as far as the user knows; 0: nobody does."""
        self.words[_EXPECT_MS_WORD] = milliseconds

    def state(self, code: int, since_us: int) -> None:
        """Say how the process is doing. The first time last of all: now there is a progress."""
        self.words[_STATE_WORD] = code << _CODE_SHIFT | since_us

    def step_duration(self, seconds: float) -> None:
        """Say how long the last step took."""
        self._step_duration[0] = seconds

    def reason(self, text: str) -> None:
        """Say why the run ended."""
        encoded = _cut(text, layout.REASON_BYTES - layout.REASON_HEAD.size)
        head = layout.REASON_HEAD.pack(len(encoded), checksum(encoded, layout.REASON))
        self.mapped[layout.REASON : layout.REASON + len(head) + len(encoded)] = head + encoded

    # -- the end

    def overwrites_unread(self) -> bool:
        """Whether what is written now takes the place of what no agent has taken."""
        if self.position <= self.ring_bytes:
            return False
        return self.position - self.agent_position() > self.ring_bytes

    def agent_position(self) -> int:
        """How far the agent has taken it over, 0 if it has not begun."""
        said = layout.read_taken(self.path.with_suffix(layout.TAKEN_SUFFIX))
        return 0 if said is None else said[0]

    def close(self) -> None:
        """Let go of the file; it stays for the agent. In a forked child it stays the parent's."""
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        self._totals.release()
        self._step_duration.release()
        words, self.words = self.words, scratch_words()
        words.release()
        # The map has a descriptor of its own, which only its size tells anything of.
        if file_of(fd) == self._file and _still_has_its_file(self.mapped):
            self.mapped.close()
        else:
            # Somebody has closed what he did not open, and the numbers may be his by now. The
            # map's end would close its own, so it has none, not even with the interpreter.
            import ctypes

            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.mapped))
        close_ours(fd, self._file)
        _open_journals.discard(self.path)


def _still_has_its_file(mapped: mmap.mmap) -> bool:
    try:
        return mapped.size() == len(mapped)
    except OSError:
        return False


def scratch_words() -> memoryview[int]:
    """What takes the place of a journal's words: whoever was on the way to them writes here."""
    return memoryview(bytearray(layout.HEAD_BYTES)).cast("Q")


def open_journal(
    directories: Sequence[Path], size: int, identity: Mapping[str, Any]
) -> tuple[JournalWriter | None, str]:
    """A journal in the first directory with room, smaller if there is little; and what to say."""
    first_why = why = ""
    for directory in directories:
        for attempt in dict.fromkeys((size, min(size, 512 * 1024), 128 * 1024)):
            try:
                if not _has_room(directory, attempt):
                    _remove_dead_journals(directory, attempt)
                if not _has_room(directory, attempt):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                writer = JournalWriter(directory, attempt, identity)
            except OSError as error:
                why = f"{directory}: {error.strerror or error}"
                first_why = first_why or why
                continue
            if attempt < size:
                return writer, (
                    f"little room in {directory}: the journal is {attempt // 1024} KiB instead of "
                    f"{size // 1024} KiB, so it bridges a shorter absence of the agent"
                )
            if directory != directories[0]:
                return writer, f"no journal in {first_why}, so it lies in {directory}"
            return writer, ""
    return None, f"no room for a journal ({why}): this process is not recorded"


def _has_room(directory: Path, size: int) -> bool:
    room = os.statvfs(directory)
    # Shared memory belongs to the data loaders and to NCCL first. A tmpfs without a limit says
    # that it has no blocks at all.
    return not room.f_blocks or room.f_bavail * room.f_frsize >= 8 * size


def _remove_dead_journals(directory: Path, size: int) -> None:
    """Make room: the journals of dead processes go, those that somebody has read first."""
    dead: list[tuple[bool, float, Path]] = []
    for path in directory.glob(f"*{layout.SUFFIX}"):
        # Our own are not asked: opening and closing a file drops the lock that we have on it.
        if path in _open_journals or lock_holder(path) is not None:
            continue
        with contextlib.suppress(OSError):
            dead.append((not _is_read(path), path.stat().st_mtime, path))
    for _, _, path in sorted(dead):
        if _has_room(directory, size):
            return
        for each in (path, *(path.with_suffix(suffix) for suffix in layout.COMPANION_SUFFIXES)):
            with contextlib.suppress(OSError):
                each.unlink()


def _is_read(path: Path) -> bool:
    try:
        reader = JournalReader(path)
    except Unreadable:
        return True
    try:
        return reader.drained()
    finally:
        reader.close()


def _json(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _cut(text: str, most_bytes: int) -> bytes:
    # At a character's end: half of one would be read as damage.
    encoded = text.encode("utf-8", "replace")
    return encoded[:most_bytes].decode("utf-8", "ignore").encode()


def _start_ticks() -> int:
    # With the pid this names a process for good: a pid alone is used again.
    try:
        with open("/proc/self/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


__all__ = ["NO_STEP", "JournalWriter", "Shape", "open_journal"]
