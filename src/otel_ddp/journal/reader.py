"""Reads a journal that another process writes. Nothing in it makes a reader raise or hang."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import files
from otel_ddp.journal import layout
from otel_ddp.journal.layout import RECORD, SCALARS_HEAD, checksum, padded
from otel_ddp.vocabulary.words import PHASE_CODE

# One read takes at most this many bytes, so that one rank cannot starve the others.
_MOST_BYTES = 4 * 1024 * 1024
# One read searches at most this much of a damaged stretch for the next record.
_MOST_DAMAGED = 256 * 1024
# So many reads wait for bytes that do not match their position yet.
_MOST_STUCK_READS = 20
# Control characters, but for those that break lines or columns, and halves of a character.
_UNPRINTABLE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")
# Fields of an identity by their kind.
_COUNTS = frozenset(
    {
        *("pid", "global_rank", "local_rank", "world_size", "local_world_size", "node_rank"),
        *("nodes", "restarts"),
    }
)
_WORDS = frozenset(
    {
        *("group", "run", "job_type", "project", "name", "description", "tags", "node", "host"),
        *("launcher", "strategy", "run_from", "launched_by", "proposal"),
    }
)
_MOST_RANKS = 2**31
# Without the code that lies above it in the same word.
_VALUE = layout.WORD_VALUE


class Name(NamedTuple):
    """A name as it was logged, and the split it was logged under."""

    text: str
    split: str


class Scalars(NamedTuple):
    """One call of `log`: pairs of name number and value."""

    time_ns: int
    step: int | None
    epoch: float | None
    values: tuple[tuple[int, float], ...]
    position: int


class Steps(NamedTuple):
    """A piece of a stream of the steps' words; see PHASE_CODE and the codes after it."""

    offset: int
    """The number of earlier words; a gap after the piece before means that words are lost."""
    words: bytes
    """Eight bytes for each word, as in the journal; the last byte is the code."""
    position: int
    on_device: bool
    """Whether the times are those of the device."""


class Document(NamedTuple):
    """A span, an event or the end, as the writer wrote it."""

    kind: int
    content: dict[str, Any]
    position: int


Record = Scalars | Document | Steps


class ProgressRecord(NamedTuple):
    """The progress of a process: its state, phase and step."""

    step: int | None
    expect_ms: int
    phase: int
    phase_name: int
    state: int
    phase_after_ns: int
    """When the phase began, counted from the creation of the journal."""
    state_since_ns: int

    @property
    def phase_code(self) -> int:
        """The phase, without what a wait in it is for."""
        return self.phase & PHASE_CODE if self.phase < layout.STEPS_BEGAN else self.phase


class Total(NamedTuple):
    """A cumulative total, or the parts of a histogram."""

    metric: str
    attributes: dict[str, str]
    values: tuple[float, ...]
    bounds: tuple[float, ...] | None


class Unreadable(Exception):
    """This file is no journal that we can read; the text says why."""


class CannotOpen(Unreadable):
    """The system did not let us open it; the next attempt may work."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(f"{path}: {error.strerror}")
        self.errno = error.errno


@dataclass
class _File:
    """The journal's bytes. What was cut off, or is asked for after the end, is not there."""

    fd: int = -1

    def read(self, at: int, size: int) -> bytes:
        # Not a mapping: if the file is truncated we get a short read, not a SIGBUS.
        try:
            return os.pread(self.fd, size, at)
        except OSError:
            return b""

    def word(self, at: int) -> int:
        word = self.read(at, 8)
        return int.from_bytes(word, "little") if len(word) == 8 else 0


class _Definitions:
    """What is written once: documents, names, and where the totals lie."""

    def __init__(self, file: _File, area: tuple[int, int]) -> None:
        self.identity: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.names: dict[int, Name] = {}
        self.totals: list[dict[str, Any]] = []
        self.unreadable = 0
        self._file = file
        self._start, self._room = area
        self._position = 0
        self._stuck = 0

    def read(self) -> None:
        """Reads what is new since the last call."""
        end = min(self._file.word(layout.DEFINITIONS_POSITION), self._room)
        while self._position < end:
            most = _MOST_DAMAGED if self._stuck else _MOST_BYTES
            block = self._file.read(self._start + self._position, min(end - self._position, most))
            taken = self._walk(block, more=self._position + len(block) < end)
            self._position += taken
            # One piece of a damaged stretch a call: however long it is, other journals wait for us.
            if not taken or self._stuck:
                break

    def _walk(self, block: bytes, more: bool) -> int:
        """Reads the definitions in this block, behind which there may be more; how far that went.

        A definition that the block cuts off is left to the next block.
        """
        at = 0
        while at + RECORD.size <= len(block):
            parsed = _record(block, at, self._position + at)
            if parsed is None:
                if at and more and not self._stuck:
                    break
                # On a weakly ordered machine the position may be visible before the bytes.
                self._stuck += 1
                if self._stuck < _MOST_STUCK_READS:
                    break
                if self._stuck == _MOST_STUCK_READS:
                    self.unreadable += 1  # once for the whole stretch
                at += 8
                continue
            self._stuck = 0
            size, kind, _, payload = parsed
            self._define(kind, payload)
            at += size
        return min(at, len(block))

    def _define(self, kind: int, payload: bytes) -> None:
        if kind == layout.NAME and len(payload) >= layout.NAME_HEAD.size:
            number, *sizes = layout.NAME_HEAD.unpack_from(payload)
            start, middle, end = accumulate(sizes, initial=layout.NAME_HEAD.size)
            name, split = payload[start:middle], payload[middle:end]
            self.names[number] = Name(clean_text(name), clean_text(split))
            return
        content = None if kind == layout.NAME else _document(payload)
        if content is None:
            self.unreadable += 1
        elif kind == layout.IDENTITY:
            # Another dictionary: a thread that reads it sees the old one or the new one.
            self.identity = _identity(content)
        elif kind == layout.CONFIG:
            self.config.update(content)
        elif kind == layout.FACTS:
            self.facts.update(content)
        elif kind in (layout.COUNTER, layout.HISTOGRAM):
            self.totals.append(content)


class _Ring:
    """The records, and how far they are read."""

    def __init__(self, file: _File, area: tuple[int, int], mark: tuple[int, int, int]) -> None:
        self.position, self.expected, self.lost = mark
        self.unreadable = 0
        self._file = file
        self._start, self.size = area
        self._stuck = 0
        # A record, and the padding before it, are written before they are published.
        self._unpublished = 2 * layout.largest_record(self.size)

    def end(self) -> int:
        """How far the writer has come."""
        # Always a multiple of eight, unless it is damaged.
        return self._file.word(layout.RING_POSITION) & ~7

    def read(self, end: int) -> list[Record]:
        """Every whole record up to this end, in order; overwritten records are counted."""
        records: list[Record] = []
        if end - self.position > self.size:
            if self.end() < end:
                return records  # Damaged: a position only grows.
            self.position = end - self.size
        read_bytes = 0
        while self.position < end and read_bytes < _MOST_BYTES:
            offset = self.position % self.size
            whole = min(end - self.position, self.size - offset)
            want = min(whole, _MOST_BYTES)
            block = self._file.read(self._start + offset, want)
            # The cut-off end of a file counts as zeros: no record, and given up in time.
            block += bytes(want - len(block))
            read_bytes += want
            stop = want if want == whole else want - layout.LARGEST_RECORD
            taken = self._walk(block, stop, records)
            self.position += taken
            if taken < want:
                break
        return records

    def _walk(self, block: bytes, stop: int, records: list[Record]) -> int:
        """Reads the records that start before *stop*; returns how far that went."""
        gone = -self._unpublished
        at = 0
        while at < stop:
            position = self.position + at
            if len(block) - at < RECORD.size:
                # Only at the end of a lap there is less room than a head, and nothing in it.
                return len(block)
            parsed = _record(block, at, position)
            if parsed is None:
                if self._stuck < _MOST_STUCK_READS and position >= gone + self._unpublished:
                    gone = self.end() - self.size
                if position < gone + self._unpublished:
                    # The writer overwrote this while we read: go on behind it.
                    at = min(len(block), max(at + 8, gone - self.position))
                elif self._stuck < _MOST_STUCK_READS:
                    # Not visible yet, or incomplete since its writer died: wait for a few reads.
                    self._stuck += 1
                    return at
                else:
                    at += 8
                continue
            self._stuck = 0
            size, kind, number, payload = parsed
            at += size
            if kind == layout.PAD:
                continue
            # Running numbers have 32 bits; a negative difference is an old record.
            gap = (number - self.expected) & 0xFFFFFFFF
            if gap < 0x80000000:
                self.lost += gap
            self.expected = (number + 1) & 0xFFFFFFFF
            record = _parsed(kind, payload, position)
            if record is None:
                self.unreadable += 1
            else:
                records.append(record)
        return at


class JournalReader:
    """One journal of another process. Raises `Unreadable` on opening, and nothing afterwards."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = _File()
        try:
            self._file.fd = files.open_own(path)
            self._open()
        except OSError as error:
            self.close()
            raise CannotOpen(path, error) from None
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        found = os.fstat(self._file.fd)
        # Not _File.read: an error of the system says nothing about the file.
        head = b""
        if stat.S_ISREG(found.st_mode):
            head = os.pread(self._file.fd, layout.FIXED.size + 4, 0)
        if len(head) < layout.FIXED.size + 4 or head[:8] != layout.MAGIC:
            raise Unreadable(f"{self.path} is not a journal")
        # fmt: off
        (_, version, head_bytes, size, *places, self.pid, self.start_ticks, _,
         self.created_ns, self.created_monotonic_ns, _) = layout.FIXED.unpack(head[:-4])
        # fmt: on
        if version != layout.VERSION:
            raise Unreadable(
                f"{self.path} is a journal of version {version}; "
                f"this otel-ddp reads version {layout.VERSION}"
            )
        if size > layout.LARGEST_FILE:
            raise Unreadable(f"{self.path} is damaged: it claims {size} bytes")
        (crc,) = layout.FIXED_CRC.unpack(head[-4:])
        areas = layout.Areas(*zip(places[::2], places[1::2], strict=True))
        if (
            crc != checksum(head[:-4], 0)
            or head_bytes != layout.HEAD_BYTES
            or found.st_size < size
            # A time before 1970 cannot be exported or served.
            or self.created_ns < 0
            or any(at < head_bytes or at + room > size for at, room in areas)
            or areas.ring[1] < 1024
            or areas.ring[1] % 8
        ):
            raise Unreadable(f"{self.path} is damaged")
        self._areas = areas
        self._taken_path = self.path.with_suffix(layout.TAKEN_SUFFIX)
        mark = layout.read_taken(self._taken_path) or (0, 1, 0)
        self.ring = _Ring(self._file, areas.ring, mark)
        self._definitions = _Definitions(self._file, areas.definitions)
        self.config, self.facts = self._definitions.config, self._definitions.facts
        self.names = self._definitions.names
        self._last_progress: ProgressRecord | None = None
        self.read_definitions()

    @property
    def identity(self) -> dict[str, Any]:
        """What the process has said of itself: another dictionary where that changes."""
        return self._definitions.identity

    @property
    def position(self) -> int:
        """How far the ring is read."""
        return self.ring.position

    @property
    def lost(self) -> int:
        """How many records were overwritten before they were read."""
        return self.ring.lost

    @property
    def unreadable(self) -> int:
        """How many records and definitions made no sense."""
        return self.ring.unreadable + self._definitions.unreadable

    def read_definitions(self) -> None:
        """Reads the definitions since the last call."""
        self._definitions.read()

    def read(self) -> list[Record]:
        """Every whole record since the last read, in order; overwritten records are counted."""
        end = self.ring.end()
        # After the position: what the records before it refer to is defined by then.
        self.read_definitions()
        return self.ring.read(end)

    def commit(self, position: int, expected: int, lost: int) -> None:
        """Records that everything before *position* was delivered."""
        content = layout.TAKEN.pack(position, expected, lost, 0)[:-4]
        content += checksum(content, 0).to_bytes(4, "little")
        # If the directory is full or gone, some records may be read again.
        with contextlib.suppress(OSError):
            fd = files.open_own(self._taken_path, os.O_WRONLY | os.O_CREAT)
            try:
                os.pwrite(fd, content, 0)
            finally:
                os.close(fd)

    def bookmark(self) -> tuple[int, int, int]:
        """The arguments of `commit`, as of now."""
        return self.ring.position, self.ring.expected, self.ring.lost

    # -- what is overwritten in place

    def latest(self) -> list[Scalars]:
        """The last record of each set of names, oldest first."""
        start, room = self._areas.latest
        end = min(self._file.word(layout.LATEST_POSITION), room)
        self.read_definitions()
        found = []
        at = 0
        while at + layout.LATEST_HEAD.size <= end:
            head = self._file.read(start + at, layout.LATEST_HEAD.size)
            if len(head) < layout.LATEST_HEAD.size:
                break
            size, complement, position = layout.LATEST_HEAD.unpack(head)
            at += layout.LATEST_HEAD.size
            if size ^ complement != 0xFFFFFFFF or at + size > end:
                break
            if not RECORD.size <= size <= layout.LARGEST_RECORD or size % 8:
                break
            block = self._file.read(start + at, size)
            parsed = _record(block, 0, position) if len(block) == size else None
            # Incomplete: its writer is writing it, or died there. The ring has it as well.
            if parsed is not None and parsed[1] == layout.SCALARS:
                record = _scalars(parsed[3], position)
                if record is not None:
                    found.append(record)
            at += size
        found.sort(key=lambda record: record.position)
        return found

    def totals(self) -> list[Total]:
        """The present value of every total."""
        start, room = self._areas.totals
        block = self._file.read(start, min(room, _MOST_BYTES))
        found = (_total(place, block) for place in self._definitions.totals)
        return [total for total in found if total is not None]

    def progress(self) -> ProgressRecord | None:
        """The progress of the process, each word as last written; None before the first state."""
        # The state first: it is written after all the rest.
        if self._file.word(layout.STATE):
            block = self._file.read(layout.PHASE, layout.PROGRESS.size)
            if len(block) == layout.PROGRESS.size:
                phase, name, step, expect_ms, state = layout.PROGRESS.unpack(block)
                self._last_progress = ProgressRecord(
                    step - 1 if step else None,
                    expect_ms,
                    phase >> layout.CODE_SHIFT,
                    name,
                    state >> layout.CODE_SHIFT,
                    phase & _VALUE,
                    (state & _VALUE) * 1000,
                )
        # If the file was cut meanwhile: the progress from before.
        return self._last_progress

    def in_mark(self) -> bool:
        """Whether it records an event of ours on its device, which a full launch queue delays."""
        return self._file.word(layout.IN_MARK) == 1

    def reason(self) -> str:
        """Why the run ended; empty if the run did not say."""
        block = self._file.read(layout.REASON, layout.REASON_BYTES)
        if len(block) < layout.REASON_HEAD.size:
            return ""
        size, crc = layout.REASON_HEAD.unpack_from(block)
        text = block[layout.REASON_HEAD.size : layout.REASON_HEAD.size + size]
        if len(text) != size or not size or crc != checksum(text, layout.REASON):
            return ""
        return clean_text(text)

    def writer_is_alive(self) -> bool:
        """Whether a process holds the journal's lock: true across PID namespaces, unlike a pid."""
        try:
            return files.holder(self._file.fd) is not None
        except (OSError, ValueError):
            return False

    def was_removed(self) -> bool:
        """Whether the file has no name any more: only those who have it open can read it."""
        try:
            return os.fstat(self._file.fd).st_nlink == 0
        except OSError:
            return False

    def unread_ratio(self) -> float:
        """The unread part of the ring, 0 to 1."""
        unread = max(0, self.ring.end() - self.ring.position)
        return float(min(1.0, unread / self.ring.size))

    def drained(self) -> bool:
        """Whether all records are read."""
        return self.ring.position >= self.ring.end()

    def close(self) -> None:
        """Closes the file; later reads return nothing."""
        fd, self._file.fd = self._file.fd, -1
        if fd >= 0:
            os.close(fd)


def _record(block: bytes, at: int, position: int) -> tuple[int, int, int, bytes] | None:
    """Size, type, number and payload of the record here; None if it is not whole."""
    crc, size, kind, _, number = RECORD.unpack_from(block, at)
    if size < RECORD.size or size % 8 or at + size > len(block):
        return None
    end = at + (RECORD.size if kind == layout.PAD else size)
    if checksum(memoryview(block)[at + 4 : end], position) != crc:
        return None
    return size, kind, number, block[at + RECORD.size : end]


def _parsed(kind: int, payload: bytes, position: int) -> Record | None:
    if kind == layout.SCALARS:
        return _scalars(payload, position)
    if kind in (layout.STEPS, layout.DEVICE_STEPS):
        if len(payload) < 16:
            return None
        on_device = kind == layout.DEVICE_STEPS
        return Steps(int.from_bytes(payload[:8], "little"), payload[8:], position, on_device)
    if kind in (layout.SPAN, layout.EVENT, layout.END):
        content = _document(payload)
        return None if content is None else Document(kind, content, position)
    return None


def _scalars(payload: bytes, position: int) -> Scalars | None:
    if len(payload) < SCALARS_HEAD.size:
        return None
    count, _, time_ns, step, epoch = SCALARS_HEAD.unpack_from(payload)
    values_at = SCALARS_HEAD.size + padded(4 * count)
    if count == 0 or values_at + 8 * count > len(payload) or time_ns < 0:
        return None
    pairs = _pairs(count)(payload, SCALARS_HEAD.size)
    return Scalars(
        time_ns,
        None if step == layout.NO_STEP else step,
        None if epoch != epoch else epoch,
        tuple(zip(pairs[:count], pairs[count:], strict=True)),
        position,
    )


@lru_cache(256)
def _pairs(count: int) -> Callable[[bytes, int], tuple[Any, ...]]:
    """Unpacks so many numbers of names, and then their values."""
    fill = padded(4 * count) - 4 * count
    return struct.Struct(f"<{count}I{fill}x{count}d").unpack_from


def clean_text(encoded: bytes) -> str:
    return _UNPRINTABLE.sub("\ufffd", encoded.decode(errors="replace"))


def _document(payload: bytes) -> dict[str, Any] | None:
    text = payload.rstrip(b"\0").decode(errors="replace")
    try:
        content = files.parse_json(text)
        # What could be unprintable is written with an escape: JSON allows no control character.
        if "\\u" in text or not text.isascii():
            content = _printable(content)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _identity(content: dict[str, Any]) -> dict[str, Any]:
    """The fields of an identity that are of their kind: labels and ranks are made of them."""
    return {
        key: value for key, value in content.items() if value is None or _is_of_its_kind(key, value)
    }


def _is_of_its_kind(key: str, value: Any) -> bool:
    if key in _COUNTS:
        return type(value) is int and 0 <= value < _MOST_RANKS
    return isinstance(value, str) or key not in _WORDS


def _printable(content: Any) -> Any:
    """This JSON value with texts that every terminal, label and encoding takes."""
    if isinstance(content, str):
        return _UNPRINTABLE.sub("\ufffd", content)
    if isinstance(content, list):
        return [_printable(each) for each in content]
    if isinstance(content, dict):
        return {_printable(key): _printable(value) for key, value in content.items()}
    return content


def _total(place: dict[str, Any], block: bytes) -> Total | None:
    index, metric = place.get("index"), place.get("metric")
    bounds, attributes = place.get("bounds"), place.get("attributes")
    if not isinstance(index, int) or not isinstance(metric, str) or index < 0:
        return None
    if not isinstance(attributes, dict) or not isinstance(bounds, (list, type(None))):
        return None
    count = 1 if bounds is None else len(bounds) + 2
    if (index + count) * 8 > len(block):
        return None
    values = struct.unpack_from(f"<{count}d", block, index * 8)
    return Total(metric, attributes, values, None if bounds is None else tuple(bounds))
