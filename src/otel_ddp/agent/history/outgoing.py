"""Makes parts of a run's history for the lead of that run, from the file that this node keeps.

Verdicts are not among them: the lead tells of its own, and says them to this node.
A part tells how buckets and texts are now, not what came to them: what comes twice counts once.
"""

from __future__ import annotations

import json
import math
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from otel_ddp.agent.history import part_pb2
from otel_ddp.history import tables
from otel_ddp.history.copied_file import COPY, is_written_here
from otel_ddp.history.run_file import RunFile
from otel_ddp.history.tables import STEP_COLUMNS, SUM_COLUMNS, Rows, SeriesKey

_S = 1_000_000_000
# Of one part: a row of steps may take 170 bytes, one of values 90.
_MOST_ROWS = 1400
_MOST_TEXT_BYTES = 200 * 1024
LONGEST_TEXT = 64 * 1024
"""Of one; a longer one stays here."""
_MOST_EVENTS = 500
# A page shows single seconds; what a part costs besides its rows is then shared by two of them.
_EVERY_S = 2.0
_LOOK_EVERY_S = 20.0
_FIRST, _LAST = -(2**62), 2**62
FRACTIONS = ("total", "low", "high", "last", "epoch")
WHOLE = tuple(column for column in SUM_COLUMNS if column not in FRACTIONS)
# What the lead makes by itself, or what is of no use there.
_OWN_KEYS = ("group", "run", "node", COPY)


class Outgoing:
    """One run, while its lead is another node's agent. The agent's loop takes; a thread makes."""

    def __init__(self, of_lead: Path, start: str) -> None:
        """*of_lead*: what the history of the lead's own node is called here.

        *start*: which start of which agent leads. Another one is told all anew.
        """
        self.start = start
        self._of_lead = of_lead
        self._shares_home = False
        self._look_at = 0.0
        self.shift_s = 0
        """What is added to every time: the lead's clock minus ours, in whole seconds."""
        self._lock = threading.Lock()
        self._made: list[bytes] = []
        # By series: the first and the last position of what has changed.
        self._changed: dict[SeriesKey, tuple[int, int]] = {}
        # What was there before the link, as far as it is not told yet.
        self._before: deque[tuple[SeriesKey, int]] | None = None
        self._told: dict[tuple[str, str], int] = {}
        self._event = 0
        self._make_at = 0.0

    # -- called by the agent's loop

    def take(self, shift_ns: int) -> list[bytes]:
        """The parts that are made. *shift_ns*: the lead's clock minus ours."""
        # Not at each wavering of the clocks: a reading belongs to one second.
        if abs(shift_ns - self.shift_s * _S) > _S:
            self.shift_s = round(shift_ns / _S)
        with self._lock:
            made, self._made = self._made, []
        return made

    # -- called by the thread that writes

    def note(self, changed: Iterable[tuple[SeriesKey, Mapping[int, Any]]]) -> None:
        """These buckets of these series were written to."""
        for key, buckets in changed:
            first, last = self._changed.get(key, (_LAST, _FIRST))
            self._changed[key] = min(first, *buckets), max(last, *buckets)

    def make(self, file: RunFile, now: float) -> None:
        """The next parts, once the last ones are taken; raises sqlite3.Error."""
        with self._lock:
            if self._made or now < self._make_at:
                return
        self._make_at = now + _EVERY_S
        if now >= self._look_at:
            self._look_at = now + _LOOK_EVERY_S
            self._shares_home = is_written_here(self._of_lead)
        if self._shares_home:
            return
        if self._before is None:
            self._before = deque((key, _FIRST) for key in file.series())
        parts = [self._texts(file), self._rows(file)]
        made = [part.SerializeToString() for part in parts if part.ByteSize()]
        with self._lock:
            self._made = made

    def _rows(self, file: RunFile) -> Any:
        part = part_pb2.Part()
        left = _MOST_ROWS
        for rows in self._next_rows(file):
            if rows.rows:
                _put(part.buckets.add(), rows, self.shift_s)
                part.version = tables.VERSION
                left -= len(rows.rows)
            if left <= 0:
                break
        return part

    def _next_rows(self, file: RunFile) -> Iterator[Rows]:
        """What has changed before what was there; what is left over waits for the next part."""
        most = _MOST_ROWS // 2
        while self._changed:
            key, (first, last) = next(iter(self._changed.items()))
            rows = file.rows(key, first, last, most)
            del self._changed[key]
            if len(rows.rows) == most:
                self._changed[key] = rows.rows[-1][0] + rows.width, last
            yield rows
        while self._before:
            key, first = self._before.popleft()
            rows = file.rows(key, first, _LAST, most)
            if len(rows.rows) == most:
                self._before.appendleft((key, rows.rows[-1][0] + rows.width))
            yield rows

    def _texts(self, file: RunFile) -> Any:
        part = part_pb2.Part()
        left = _MOST_TEXT_BYTES
        for table in ("about", "ranks"):
            for name, text in file.texts(table).items():
                if self._is_told(table, name, text):
                    continue
                size = len(name) + len(text)
                if size > min(left, LONGEST_TEXT):
                    continue  # the next part may have room for it
                left -= size
                self._told[table, name] = hash(text)
                if table == "about" and name in _TIMES:
                    text = json.dumps(json.loads(text) + self.shift_s * _S)
                getattr(part, table).add(key=name, json=text)
        for id, event in file.events_after(self._event, _MOST_EVENTS):
            row = part_pb2.Event(
                id=id,
                time_ns=event.time_ns + self.shift_s * _S,
                step=event.step,
                attributes=json.dumps(event.attributes),
                **{each: getattr(event, each) for each in ("rank", "name", "severity", "body")},
            )
            size = row.ByteSize()
            if left < size <= LONGEST_TEXT:
                break
            self._event = id
            if size <= LONGEST_TEXT:
                left -= size
                part.events.append(row)
        if part.ByteSize():
            part.version = tables.VERSION
        return part

    def _is_told(self, table: str, name: str, text: str) -> bool:
        of_lead = table == "about" and name in _OWN_KEYS
        return of_lead or self._told.get((table, name)) == hash(text)


_TIMES = ("began_ns", "seen_ns")


def _put(buckets: Any, found: Rows, shift_s: int) -> None:
    key, rows = found.key, found.rows
    buckets.kind, buckets.name, buckets.rank = key.kind, key.name, key.rank
    buckets.labels.extend(word for pair in key.labels for word in pair)
    buckets.width = found.width
    of_steps = key.kind == "steps"
    names = ("start", *(STEP_COLUMNS if of_steps else SUM_COLUMNS))
    fractions = () if of_steps else FRACTIONS
    # The position of a reading is its second.
    later: dict[str, int] = {"first_ns": shift_s * _S, "last_ns": shift_s * _S}
    if key.kind in ("node", "counter"):
        whole_buckets = shift_s - shift_s % found.width if found.width > 1 else shift_s
        later |= dict.fromkeys(("start", "first", "until"), whole_buckets)
    for row in rows:
        of_row = dict(zip(names, row, strict=True))
        if not math.isfinite(of_row.get("total", 0.0)):
            continue  # a sum of huge values: no picture shows it
        buckets.whole.extend(
            value + later.get(name, 0) for name, value in of_row.items() if name not in fractions
        )
        buckets.fractions.extend(
            float("nan") if of_row[name] is None else of_row[name] for name in fractions
        )
