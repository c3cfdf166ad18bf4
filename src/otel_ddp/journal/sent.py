"""Sends parts of a journal to an agent on another node, which reads them as a journal there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from otel_ddp import plain
from otel_ddp.journal import layout, parser
from otel_ddp.journal.reader import Ring
from otel_ddp.vocabulary import catalog

# The types of records that are sent to the agent that leads the run: steps, by which it judges the
# run; values and events, for the run's history; and the definitions for both.
_STEPS = frozenset({layout.STEPS, layout.DEVICE_STEPS})
_VALUES = frozenset({layout.SCALARS, layout.EVENT})
_DEFINITIONS = frozenset({layout.IDENTITY, layout.NAME, layout.FACTS})
KEPT_TOTALS = frozenset({catalog.TRAINING_STEP_DURATION.name, catalog.OTEL_DDP_HOOK_TIME.name})
"""The totals that are stored in the history of a rank, besides its steps and phases."""
_TOTALS_NAMED = tuple(f'"{name}"'.encode() for name in {*KEPT_TOTALS, catalog.TRAINING_STEPS.name})
# The most bytes of definitions that one report has, and that are accepted for one journal.
_MOST_DEFINITIONS, _MOST_DEFINED = 64 * 1024, 256 * 1024
_PROGRESS_BYTES = layout.IN_MARK + 8 - layout.PHASE
# Only the first bytes of the totals area are sent, which contain the totals above.
_TOTALS_BYTES = 4096
# When reading is resumed at a position, this many bytes before it are read again: a step starts
# when the previous step ends, and that end is in an earlier record.
_SOME_STEPS = 16 * 1024
# The keys of events and spans whose values are wall-clock times.
_TIMES = ("time", "start", "end")
# The largest valid time, and the largest position in a journal.
_LAST_NS = _LAST_PLACE = 1 << 62
_LONGEST_NAME = 200


class Stretch(NamedTuple):
    """A range of positions, *since* to *until*, and the pieces of it that are sent: the position at
    which each piece begins, and its bytes."""

    since: int
    until: int
    at: list[int]
    content: list[bytes]

    @classmethod
    def of(cls, since: int, until: int, records: Iterable[tuple[int, bytes]]) -> Stretch:
        """Merge adjacent records into pieces. A record without content is not to be sent."""
        found = cls(since, until, [], [])
        for position, content in records:
            if content and found.at and position == found.at[-1] + len(found.content[-1]):
                found.content[-1] += content
            elif content:
                found.at.append(position)
                found.content.append(content)
        return found


class SentJournal:
    """Reads the parts of a journal that are sent to another node. This goes on even after the
    agent's own reader was closed and the file was deleted."""

    def __init__(self, reader: parser.Journal, mark: tuple[int, int, int]) -> None:
        """*mark*: where to begin sending records; the receiver may request earlier ones."""
        self._reader = reader
        self._file = reader.content.again()
        self._areas = reader.areas
        self._ring = Ring(self._file, self._areas.ring, mark, self._sent)
        self._defined, self._lost_before = parser.Records(made=_definition), mark[2]
        # Whether to send values, events and checkpoints too, because the receiver writes a history.
        self.sends_values = False

    def close(self) -> None:
        self._file.close()

    @property
    def lost(self) -> int:
        """How many records were overwritten before they were sent."""
        return self._ring.lost - self._lost_before

    def go_back(self, defined: int, position: int) -> None:
        """Send definitions from *defined* on and records from *position* on again, as far as they
        still exist."""
        self._defined.position = min(defined, self._defined.position)
        if position < self._ring.position:
            self._ring.go_back(position, _SOME_STEPS)

    def head(self) -> bytes:
        return self._file.read(0, layout.FIXED.size + layout.FIXED_CRC.size)

    def progress(self) -> bytes:
        return self._file.read(layout.PHASE, _PROGRESS_BYTES)

    def totals(self) -> bytes:
        start, room = self._areas.totals
        block = self._file.read(start, min(room, _TOTALS_BYTES)).rstrip(b"\0")
        return block.ljust(layout.padded(len(block)), b"\0")

    def reason(self) -> bytes:
        return self._file.read(layout.REASON, layout.REASON_BYTES)

    def definitions(self) -> Stretch:
        """The definitions that the agent's reader has read, and that were not sent yet."""
        since, (start, _) = self._defined.position, self._areas.definitions
        end = self._reader.defined
        block = self._file.read(start + since, min(end - since, _MOST_DEFINITIONS))
        records = self._defined.feed(block, len(block) - layout.RECORD.size + 1)
        if self._defined.position == since:
            # The block is damaged: skip it, as the agent's reader did.
            self._defined.position = end
        return Stretch.of(since, self._defined.position, records)

    def records(self, most: int) -> Stretch:
        """The records that the agent's reader has read, and that were not sent yet.

        *most*: the most bytes to read from the ring.
        """
        since = self._ring.position
        found = self._ring.read(self._reader.position, most)
        return Stretch.of(since, self._ring.position, found)

    def _sent(self, kind: int, whole: bytes, position: int) -> tuple[int, bytes]:
        is_sent = kind in _STEPS or (self.sends_values and kind in _VALUES)
        if kind == layout.SPAN:
            # Send only the spans of checkpoints: a history needs no others.
            is_sent = self.sends_values and b'"checkpoint"' in whole
        return position, whole if is_sent else b""


def _definition(kind: int, whole: bytes, position: int) -> tuple[int, bytes]:
    is_sent = kind in _DEFINITIONS or any(each in whole for each in _TOTALS_NAMED)
    return position, whole if is_sent else b""


class _Places(parser.Bytes):
    """The bytes of a journal that were received, by their offset in the journal file."""

    def __init__(self) -> None:
        self.known: dict[int, bytes] = {}

    def read(self, at: int, size: int) -> bytes:
        for start, content in self.known.items():
            if start <= at < start + len(content):
                return content[at - start : at - start + size]
        return b""


class ReceivedJournal(parser.Journal):
    """The part that was received of a journal on another node. Its times are converted to this
    node's clock."""

    content: _Places

    def __init__(self, name: str, head: bytes, ahead_ns: int) -> None:
        """*ahead_ns*: this node's wall clock minus the monotonic clock of the journal's node.

        Raises Unreadable.
        """
        if not (name.isprintable() and 0 < len(name) <= _LONGEST_NAME):
            raise parser.Unreadable("a journal without a name")
        self.head = head
        self._head = parser.Head.parse(head, name)
        super().__init__(Path(name), self._head, _Places(), parser.Definitions(), parser.Records())
        self._new: list[parser.Record] = []
        self._lost = self._new_lost = self._sent_lost = self._defined_bytes = 0
        self._until, self._resumed = -1, 0
        self.created_ns = -1
        self.set_clock(ahead_ns)
        if self.created_ns < 0:
            raise parser.Unreadable(f"{name} is damaged")

    def set_clock(self, ahead_ns: int) -> None:
        """Set a new clock offset, after it was measured again. *ahead_ns*: see the constructor."""
        created_ns = self._head.created_monotonic_ns + ahead_ns
        if 0 <= created_ns < _LAST_NS:
            self.created_ns = created_ns

    @property
    def is_new(self) -> bool:
        """Whether no records of this journal have been received yet."""
        return self._until < 0

    def resume(self, position: int) -> None:
        """Receive records from this position on: the run's history contains all earlier ones."""
        self._resumed, self._until = position, max(position - _SOME_STEPS, 0)

    @property
    def position(self) -> int:
        """The position up to which the records of the ring have been received."""
        return max(self._until, self._resumed)

    def put(self, progress: bytes, totals: bytes, reason: bytes) -> None:
        """Replace the areas that a writer overwrites in place. Empty bytes leave an area as is."""
        at_totals, _ = self.areas.totals
        for at, content, most in (
            (layout.PHASE, progress, _PROGRESS_BYTES),
            (at_totals, totals, _TOTALS_BYTES),
            (layout.REASON, reason, layout.REASON_BYTES),
        ):
            if content:
                self.content.known[at] = content[:most]

    def define(self, stretch: Stretch) -> bool:
        """Add definitions; False if earlier definitions are missing. Raises Unreadable."""
        _check_places(stretch)
        definitions = self._definitions
        if stretch.since > definitions.position:
            return False
        for position, content in zip(stretch.at, stretch.content, strict=False):
            self._defined_bytes += len(content)
            if position >= definitions.position and self._defined_bytes <= _MOST_DEFINED:
                definitions.position = position
                definitions.feed(content)
        definitions.position = max(definitions.position, stretch.until)
        return True

    def add(self, stretch: Stretch, lost: int) -> bool:
        """Add records; False if earlier records are missing. Raises Unreadable.

        *lost*: how many records of this journal were overwritten before they could be sent.
        """
        _check_places(stretch)
        if self._until < 0:
            self._until = stretch.since
        if stretch.since > self._until:
            # A smaller number than before means that the sending agent was restarted: it counts
            # lost records from 0 again.
            if lost < self._sent_lost:
                self._sent_lost = 0
            return False
        is_gap = stretch.since == self._until or [*stretch.at, stretch.until][0] > self._until
        # After a restart, the sending agent also counts overwritten records as lost that were sent
        # before.
        more, self._sent_lost = max(lost - self._sent_lost, 0), lost
        gaps = [0] if self.ring.expected == 1 else []
        for position, content in zip(stretch.at, stretch.content, strict=False):
            # Skip what was received before: after a restart, the sending agent sends some records
            # again.
            known = max(self._until - position, 0)
            if known < len(content):
                self.ring.position, before = position + known, self.ring.lost
                self._new += self.ring.feed(content[known:])
                gaps.append(self.ring.lost - before)
        if more and is_gap:
            # If the sender went back and found records overwritten, it has counted them as one. The
            # gap in the sequence numbers shows how many they were.
            self._new_lost += max([more, *gaps[:1]])
        self._until = max(self._until, stretch.until)
        return True

    @property
    def lost(self) -> int:
        # Don't use the reader's count of lost records, i.e. of gaps in the sequence numbers: gaps
        # are normal here, since not all records are sent.
        return self._lost

    def read(self) -> list[parser.Record]:
        self._lost, self._new_lost = self._lost + self._new_lost, 0
        new, self._new = self._new, []
        return [self._by_our_clock(each) for each in new]

    def _by_our_clock(self, record: parser.Record) -> parser.Record:
        """The record, with its times converted to this node's clock. Records of steps need no
        conversion: their times count from the creation of the journal."""
        if isinstance(record, parser.Scalars):
            return record._replace(time_ns=self._shifted(record.time_ns))
        if isinstance(record, parser.Document):
            content = record.content
            known = {key: plain.whole(content.get(key)) for key in _TIMES}
            times = {key: self._shifted(ns) for key, ns in known.items() if ns is not None}
            return record._replace(content={**content, **times})
        return record

    def _shifted(self, time_ns: int) -> int:
        return min(max(time_ns + self.created_ns - self._head.created_ns, 0), _LAST_NS)

    def progress(self) -> parser.ProgressRecord | None:
        found = super().progress()
        if found is None:
            return None
        return found._replace(state_since_ns=self._shifted(found.state_since_ns))


def _check_places(stretch: Stretch) -> None:
    """Raise Unreadable if a position is too large for a request to send records again."""
    if max(stretch.since, stretch.until, *stretch.at) > _LAST_PLACE:
        raise parser.Unreadable("a place that no journal has")
