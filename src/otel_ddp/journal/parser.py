"""Parses the bytes of a journal from any source. No input makes it raise or hang."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from sys import intern
from typing import Any, NamedTuple

from otel_ddp import files
from otel_ddp.journal import layout
from otel_ddp.journal.layout import RECORD, SCALARS_HEAD, checksum, padded
from otel_ddp.vocabulary.words import PHASE_CODE

# How many bytes of the totals area are read at most.
_MOST_TOTALS = 4 * 1024 * 1024
# Characters that are replaced in all texts: control characters other than line breaks and tabs, and
# lone surrogates.
_UNPRINTABLE = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\ud800-\\udfff]")
# The fields of an identity that must be whole numbers, and those that must be text.
_COUNTS = re.compile("pid|(global|local|node)_rank|(local_)?world_size|nodes|restarts")
_TEXTS = re.compile(
    "group|run|job_type|project|name|description|tags|node|host|launcher|strategy|run_from|"
    "launched_by|proposal"
)
_MOST_RANKS = 2**31
# Where, in a record of steps, the words begin; and where, in a record of values, the numbers of the
# names begin.
_WORDS_AT, _VALUES_AT = RECORD.size + 8, RECORD.size + SCALARS_HEAD.size
# Masks the value in a word: the bits below the code.
_VALUE = layout.WORD_VALUE


class Name(NamedTuple):
    """The name of a logged value, and its split, such as `val`; the split may be empty."""

    text: str
    split: str


class Scalars(NamedTuple):
    """The values that one call of `log` has recorded."""

    time_ns: int
    step: int | None
    epoch: float | None
    names: tuple[int, ...]
    """For each of `values`, the number of its name."""
    values: tuple[float, ...]
    position: int


class Steps(NamedTuple):
    """A piece of the stream of words on steps. `layout` explains the codes of these words."""

    offset: int
    """How many words of the stream come before this piece. A jump means that words were lost."""
    words: bytes
    """Eight bytes per word, as in the journal; the last byte is the code."""
    position: int
    on_device: bool


class Document(NamedTuple):
    """A record with JSON content: a span, an event, or the end of the run."""

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
    """When the phase began, in nanoseconds after the creation of the journal."""
    state_since_ns: int

    @property
    def phase_code(self) -> int:
        """The code of the phase, without the flags in the bits above."""
        return self.phase & PHASE_CODE if self.phase < layout.STEPS_BEGAN else self.phase


class Total(NamedTuple):
    """A counter's cumulative total, or a histogram's sum and buckets."""

    metric: str
    attributes: dict[str, str]
    values: tuple[float, ...]
    bounds: tuple[float, ...] | None


class Unreadable(Exception):
    """A file or its content is not a readable journal; the text says why."""


class Head(NamedTuple):
    """The head of a journal, which never changes."""

    size: int
    areas: layout.Areas
    pid: int
    start_ticks: int
    created_ns: int
    created_monotonic_ns: int

    @classmethod
    def parse(cls, content: bytes, whose: str) -> Head:
        """*whose*: the journal's name, for the text of the error. Raises Unreadable."""
        if len(content) < layout.FIXED.size + 4 or content[:8] != layout.MAGIC:
            raise Unreadable(f"{whose} is not a journal")
        fixed, rest = content[: layout.FIXED.size], content[layout.FIXED.size :]
        # fmt: off
        (_, version, head_bytes, size, *places, pid, start_ticks, _,
         created_ns, created_monotonic_ns, _) = layout.FIXED.unpack(fixed)
        # fmt: on
        if version != layout.VERSION:
            raise Unreadable(
                f"{whose} is a journal of version {version}; "
                f"this otel-ddp reads version {layout.VERSION}"
            )
        areas = layout.Areas(*zip(places[::2], places[1::2], strict=True))
        if (
            layout.FIXED_CRC.unpack(rest[:4])[0] != checksum(fixed, 0)
            or head_bytes != layout.HEAD_BYTES
            # Refuse times before 1970: they cannot be exported.
            or created_ns < 0
            or any(at < head_bytes or at + room > size for at, room in areas)
            or areas.ring[1] < 1024
            or areas.ring[1] % 8
        ):
            raise Unreadable(f"{whose} is damaged")
        return cls(size, areas, pid, start_ticks, created_ns, created_monotonic_ns)


Made = Callable[[int, bytes, int], Any]


class Records:
    """Parses the records of an area of a journal, in order."""

    def __init__(self, mark: tuple[int, int, int] = (0, 1, 0), made: Made | None = None) -> None:
        """*mark*: where an earlier read stopped: position, next sequence number, lost records.

        *made*: makes a record from its type, bytes and position; returns None if they are invalid.
        """
        self.position, self.expected, self.lost = mark
        self._made = made or _parsed
        self.unreadable = 0
        # How many consecutive reads have found no valid record at this position.
        self.stuck = 0

    def feed(self, block: bytes, stop: int | None = None) -> list[Any]:
        """Parse the complete records of a block of bytes. The block starts at `position`.

        *stop*: an offset in the block; records that begin there or later are not read.
        """
        records: list[Any] = []
        stop = len(block) if stop is None else stop
        at = 0
        while at < stop:
            if len(block) - at < RECORD.size:
                # Skip these bytes: the writer leaves the end of the ring unused if the head of a
                # record does not fit there.
                at = len(block)
                break
            position = self.position + at
            parsed = _record(block, at, position)
            if parsed is None:
                if not (skipped := self._skip(position)):
                    break
                at = min(len(block), at + skipped)
                continue
            self.stuck = 0
            size, kind, number, whole = parsed
            at += size
            if kind == layout.PAD:
                continue
            # Sequence numbers wrap at 32 bits. A difference in the upper half is negative: this is
            # an old record, and none was lost.
            gap = (number - self.expected) & 0xFFFFFFFF
            if gap < 0x80000000:
                self.lost += gap
            self.expected = (number + 1) & 0xFFFFFFFF
            record = self._made(kind, whole, position)
            if record is None:
                self.unreadable += 1
            else:
                records.append(record)
        self.position += at
        return records

    def _skip(self, position: int) -> int:
        """How many bytes to skip at an invalid record; 0 to wait, as it may still become valid."""
        return 0


class Definitions(Records):
    """The definitions: records that are never overwritten. They are JSON documents, names of
    values, and the totals with their slots in the totals area."""

    def __init__(self) -> None:
        super().__init__(made=self._define)
        self.identity: dict[str, Any] = {}
        self.config: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self.names: dict[int, Name] = {}
        # All totals, each with the index of its first slot in the totals area.
        self.totals: list[tuple[int, Total]] = []

    def _define(self, kind: int, whole: bytes, position: int) -> bool | None:
        """Apply the definition in a record; returns True, or None if it is invalid."""
        payload = whole[RECORD.size :]
        if kind == layout.NAME and len(payload) >= layout.NAME_HEAD.size:
            number, *sizes = layout.NAME_HEAD.unpack_from(payload)
            start, middle, end = accumulate(sizes, initial=layout.NAME_HEAD.size)
            name, split = payload[start:middle], payload[middle:end]
            self.names[number] = Name(intern(clean_text(name)), intern(clean_text(split)))
            return True
        content = None if kind == layout.NAME else _document(payload)
        if content is None:
            return None
        if kind == layout.IDENTITY:
            # Assign a new dictionary, so that other threads see either the old or the new identity,
            # and never a mixture.
            self.identity = _identity(content)
        elif kind == layout.CONFIG:
            self.config.update(content)
        elif kind == layout.FACTS:
            self.facts.update(_shared(content))
        elif kind in (layout.COUNTER, layout.HISTOGRAM):
            self.totals += _totals(content)
        return True


class Bytes:
    """A source of a journal's bytes, which are addressed by their offset in the file."""

    def read(self, at: int, size: int) -> bytes:
        """Up to *size* bytes from this offset; fewer if the source has no more."""
        raise NotImplementedError

    def again(self) -> Bytes:
        """Open another source of the same bytes, which stays open when this one is closed."""
        return self

    def close(self) -> None:
        """Close the source: later reads return nothing."""

    def word(self, at: int) -> int:
        """The 64-bit word at this offset; 0 if it is missing."""
        word = self.read(at, 8)
        return int.from_bytes(word, "little") if len(word) == 8 else 0


class Journal:
    """A journal whose bytes come from a file, or from an agent on another node."""

    def __init__(
        self, path: Path, head: Head, content: Bytes, definitions: Definitions, ring: Records
    ) -> None:
        """*path*: the path of the journal on the node on which its process runs."""
        self.path, self.ring = path, ring
        _, self.areas, self.pid, self.start_ticks, self.created_ns, created_ns = head
        self.created_monotonic_ns = created_ns
        self.content = content
        self._definitions = definitions
        self.config, self.facts = definitions.config, definitions.facts
        self.names = definitions.names

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def identity(self) -> dict[str, Any]:
        """The identity of the process; replaced by a new dictionary when it changes."""
        return self._definitions.identity

    @property
    def defined(self) -> int:
        """The position up to which the definitions have been read."""
        return self._definitions.position

    @property
    def position(self) -> int:
        """The position up to which the ring has been read."""
        return self.ring.position

    def bookmark(self) -> tuple[int, int, int]:
        """Where to continue reading the ring; see *mark* in `Records`."""
        return self.ring.position, self.ring.expected, self.ring.lost

    @property
    def lost(self) -> int:
        """How many records were overwritten before they were read."""
        return self.ring.lost

    @property
    def unreadable(self) -> int:
        """How many records and definitions were invalid."""
        return self.ring.unreadable + self._definitions.unreadable

    def read_definitions(self) -> None:
        """Read new definitions."""

    def read(self) -> list[Record]:
        """Read the complete records since the last read, in order. Records that were overwritten
        before they were read count as lost."""
        raise NotImplementedError

    # -- areas that are overwritten in place

    def latest(self) -> list[Scalars]:
        """For each set of names that was logged together: its last record. Oldest first."""
        start, room = self.areas.latest
        block = self.content.read(start, min(self.content.word(layout.LATEST_POSITION), room))
        # Read the definitions after the records, so that they include all names in the records.
        self.read_definitions()
        found = []
        at = 0
        while at + layout.LATEST_HEAD.size + RECORD.size <= len(block):
            size, complement, position = layout.LATEST_HEAD.unpack_from(block, at)
            at += layout.LATEST_HEAD.size
            if size ^ complement != 0xFFFFFFFF or size % 8:
                break
            parsed = _record(block, at, position)
            # This block repeats records of the ring. So a record that is half written can be
            # skipped: nothing is lost.
            if parsed is not None and parsed[1] == layout.SCALARS:
                record = _scalars(parsed[3], position)
                if record is not None:
                    found.append(record)
            at += size
        found.sort(key=lambda record: record.position)
        return found

    def totals(self, metric: str = "") -> list[Total]:
        """The current values of the totals of one metric, or of all metrics."""
        start, room = self.areas.totals
        block = self.content.read(start, min(room, _MOST_TOTALS))
        found = []
        for at, total in self._definitions.totals:
            count = 1 if total.bounds is None else len(total.bounds) + 2
            if metric in ("", total.metric) and (at + count) * 8 <= len(block):
                values = struct.unpack_from(f"<{count}d", block, at * 8)
                found.append(Total(total.metric, total.attributes, values, total.bounds))
        return found

    def progress(self) -> ProgressRecord | None:
        """The progress of the process; None if it has not written its first state yet."""
        # Read the state before the other words: the writer writes it last, so once there is a
        # state, the other words are written too.
        is_reported = self.content.word(layout.STATE)
        block = self.content.read(layout.PHASE, layout.PROGRESS.size)
        if not is_reported or len(block) < layout.PROGRESS.size:
            return None
        phase, name, step, expect_ms, state = layout.PROGRESS.unpack(block)
        return ProgressRecord(
            step - 1 if step else None,
            expect_ms,
            phase >> layout.CODE_SHIFT,
            name,
            state >> layout.CODE_SHIFT,
            phase & _VALUE,
            (state & _VALUE) * 1000,
        )

    def in_mark(self) -> bool:
        """Whether otel_ddp is just launching an event or a copy on the process's device. The launch
        blocks while the device's launch queue is full."""
        return self.content.word(layout.IN_MARK) == 1

    def reason(self) -> str:
        """Why the run ended; empty if the run gave no reason."""
        block = self.content.read(layout.REASON, layout.REASON_BYTES)
        if len(block) < layout.REASON_HEAD.size:
            return ""
        size, crc = layout.REASON_HEAD.unpack_from(block)
        text = block[layout.REASON_HEAD.size : layout.REASON_HEAD.size + size]
        if len(text) != size or not size or crc != checksum(text, layout.REASON):
            return ""
        return clean_text(text)


def _record(block: bytes, at: int, position: int) -> tuple[int, int, int, bytes] | None:
    """Size, type, sequence number and bytes of the record at offset *at* of a block.

    None if the record is incomplete or damaged.
    """
    crc, size, kind, _, number = RECORD.unpack_from(block, at)
    if size < RECORD.size or size % 8 or at + size > len(block):
        return None
    end = at + (RECORD.size if kind == layout.PAD else size)
    if checksum(memoryview(block)[at + 4 : end], position) != crc:
        return None
    return size, kind, number, block[at:end]


def _parsed(kind: int, whole: bytes, position: int) -> Record | None:
    if kind == layout.SCALARS:
        return _scalars(whole, position)
    if kind in (layout.STEPS, layout.DEVICE_STEPS):
        words = whole[_WORDS_AT:]
        if len(words) < 8:
            return None
        offset = int.from_bytes(whole[RECORD.size : _WORDS_AT], "little")
        return Steps(offset, words, position, kind == layout.DEVICE_STEPS)
    if kind in (layout.SPAN, layout.EVENT, layout.END):
        content = _document(whole[RECORD.size :])
        return None if content is None else Document(kind, content, position)
    return None


def _scalars(whole: bytes, position: int) -> Scalars | None:
    if len(whole) < _VALUES_AT:
        return None
    count, _, time_ns, step, epoch = SCALARS_HEAD.unpack_from(whole, RECORD.size)
    if count == 0 or _VALUES_AT + padded(4 * count) + 8 * count > len(whole) or time_ns < 0:
        return None
    pairs = _pairs(count)(whole, _VALUES_AT)
    return Scalars(
        time_ns,
        None if step == layout.NO_STEP else step,
        None if epoch != epoch else epoch,
        pairs[:count],
        pairs[count:],
        position,
    )


@lru_cache(256)
def _pairs(count: int) -> Callable[[bytes, int], tuple[Any, ...]]:
    """A function that unpacks the numbers of *count* names, followed by *count* values."""
    fill = padded(4 * count) - 4 * count
    return struct.Struct(f"<{count}I{fill}x{count}d").unpack_from


def clean_text(encoded: bytes) -> str:
    return _UNPRINTABLE.sub("\ufffd", encoded.decode(errors="replace"))


def _document(payload: bytes) -> dict[str, Any] | None:
    text = payload.rstrip(b"\0").decode(errors="replace")
    try:
        content = files.parse_json(text)
        # An ASCII text without an escape has no control character but DEL, which JSON does not
        # escape.
        if "\\" in text or "\x7f" in text or not text.isascii():
            content = _printable(content)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _identity(content: dict[str, Any]) -> dict[str, Any]:
    """An identity without fields of a wrong type, since labels and ranks are made from them."""
    found = _shared(content)
    return {key: v for key, v in found.items() if v is None or _is_of_its_kind(key, v)}


def _shared(content: dict[str, Any]) -> dict[str, Any]:
    """The same content with interned strings, to save memory: the agent that leads a run may hold
    the content of ten thousand ranks."""
    return {intern(key): intern(v) if type(v) is str else v for key, v in content.items()}


def _is_of_its_kind(key: str, value: Any) -> bool:
    if _COUNTS.fullmatch(key):
        return type(value) is int and 0 <= value < _MOST_RANKS
    return isinstance(value, str) or not _TEXTS.fullmatch(key)


def _printable(content: Any) -> Any:
    """The same JSON value, with the unprintable characters in its texts replaced."""
    if isinstance(content, str):
        return _UNPRINTABLE.sub("\ufffd", content)
    if isinstance(content, list):
        return [_printable(each) for each in content]
    if isinstance(content, dict):
        return {_printable(key): _printable(value) for key, value in content.items()}
    return content


def _totals(content: dict[str, Any]) -> Iterator[tuple[int, Total]]:
    """Yield the total that a valid document defines, still without values, and its first slot."""
    index, metric = content.get("index"), content.get("metric")
    bounds, attributes = content.get("bounds"), content.get("attributes")
    if not isinstance(index, int) or not isinstance(metric, str) or index < 0:
        return
    if not isinstance(attributes, dict) or not isinstance(bounds, (list, type(None))):
        return
    yield index, Total(intern(metric), attributes, (), None if bounds is None else tuple(bounds))
