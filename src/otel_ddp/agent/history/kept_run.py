"""The history of one run: collects records, and writes them to its file."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import errors, files, plain
from otel_ddp.agent.history.attempts import Placed
from otel_ddp.agent.history.run_time import ProcessTime, RunTime
from otel_ddp.agent.reading.process import News
from otel_ddp.history.buckets import Row, step_row, value_row
from otel_ddp.history.run_file import RunFile
from otel_ddp.history.tables import Event, RunKey, SeriesKey
from otel_ddp.journal.parser import Document, Name, Scalars
from otel_ddp.vocabulary.words import PHASE_CODE, PHASES, UNUSUAL_PHASES

log = logging.getLogger("otel_ddp.agent")

_S = 1_000_000_000
_UNUSUAL = {PHASES[word] for word in UNUSUAL_PHASES}
# Limit of rows that wait in memory while the disk is full or hangs; they take about 100 MB.
_MOST_WAITING = 200_000
_MOST_SAMPLES = 100_000
_MOST_GAPS = 100
_ONE_GAP_NS = 60 * _S
_LONGEST_BODY = 4000
_LONGEST_STEP_NS, _MOST_WORK = 1 << 50, 1 << 50


class Sample(NamedTuple):
    """One value of a sampled metric. If *run* is None, it is about the node, and is stored for each
    run on the node."""

    run: RunKey | None
    key: SeriesKey
    time_ns: int
    value: float


class Batch(NamedTuple):
    """The records of one process since its last batch."""

    run: RunKey
    process: ProcessTime
    position: int
    """Up to which offset the journal was read, including this batch."""
    names: Mapping[int, Name]
    news: News
    since: int = 0
    """The offset at which this agent began to read the journal."""


class State(NamedTuple):
    """A snapshot of a run."""

    about: Mapping[str, Any]
    ranks: Mapping[str, Mapping[str, Any]]
    verdicts: Sequence[Mapping[str, Any]]
    samples: Sequence[Sample]
    processes: Sequence[ProcessTime] = ()

    def after(self, before: State) -> State:
        """This snapshot, completed by the older one *before*. The journals of some of its ranks may
        be closed by now."""
        found = {(each.rank, each.began_ns): each for each in (*before.processes, *self.processes)}
        return self._replace(
            about={**before.about, **self.about},
            ranks={**before.ranks, **self.ranks},
            processes=[*found.values()],
            samples=[*before.samples, *self.samples][-_MOST_SAMPLES:],
        )


class _Unwritten:
    """Rows, events and offsets that are not written yet."""

    def __init__(self) -> None:
        self.rows: dict[SeriesKey, list[Row]] = {}
        self.events: list[Event] = []
        self.positions: dict[str, tuple[int, int, int]] = {}
        """For each journal: the read offset, and the ends of its last steps by host and device."""
        self.named: dict[tuple[str, str], dict[int, tuple[SeriesKey, list[Row]]]] = {}
        """By journal and rank: for the number of each logged name, its series and new rows."""

    @property
    def size(self) -> int:
        return len(self.events) + sum(map(len, self.rows.values()))


def _journal_of(rank: Mapping[str, Any]) -> str:
    """The name of a remote rank's journal, as `ProcessTime` has it."""
    return f"{rank.get('node')}/{rank.get('journal')}"


# Cached, since the steps of a training mostly have the same phases.
@lru_cache(256)
def _is_unusual(codes: bytes) -> bool:
    return not _UNUSUAL.isdisjoint(code & PHASE_CODE for code in codes)


class KeptRun:
    """The history of one run. Only the history thread calls it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: Mapping[str, int] | None = None
        """For each journal, up to which offset the file has its records. None before `open`."""
        self._file: RunFile | None = None
        self._positions: dict[str, tuple[int, int, int]] = {}
        # The first known beginning of each journal, and the earliest beginning of a process on each
        # other node. Later reports differ a little, as the measured clock offset changes.
        self._began: dict[str, int] = {}
        self._nodes: dict[str, int] = {}
        self._counts: dict[SeriesKey, int] = {}
        self._sampled: dict[SeriesKey, int] = {}
        self._state = State({}, {}, (), ())
        self._written = State({}, {}, (), ())
        self._gaps: list[dict[str, Any]] = []
        self._began_ns = 0
        self.failing = (0, "")
        """Since when writing fails, and why; 0 while it works."""
        self._new = _Unwritten()
        self.time = RunTime()

    def open(self) -> None:
        """Create or reopen the file; raises sqlite3.Error, OSError or Unusable."""
        files.make_kept(self.path.parent)
        if self._file is not None:
            if self.path.exists():
                return
            # Somebody has removed the file, but it is still open: copy its content to a new file,
            # as it would be lost when the file is closed.
            self._file.put_back()
            self.close()
            log.warning("the history %s was removed, and is made again", self.path)
        file = RunFile(self.path)
        try:
            self._positions = file.read_positions()
            self._began_ns = plain.whole(file.about("began_ns")) or 0
            errors.attempt(lambda: self._restore(file), None)
            self._gaps = [*(file.about("gaps") or []), *self._gaps][-_MOST_GAPS:]
        except BaseException:
            file.close()
            raise
        self._file = file
        self._written = State({}, {}, (), ())
        self._note_written()

    def _note_written(self) -> None:
        self.written = {journal: position for journal, (position, *_) in self._positions.items()}

    def _restore(self, file: RunFile) -> None:
        self._nodes = (file.about("nodes") or {}) | self._nodes
        if self.time.restore({key: file.about(key) for key in ("time", "attempts")}):
            for rank, (since_ns, until_ns) in (file.about("held") or {}).items():
                why = f"the agent was restarted before the step numbers of rank {rank} were known"
                # Not merged with another such gap: between the two, nothing is missing.
                self._gaps.append({"since_ns": since_ns, "until_ns": until_ns, "why": why})
        self._began = (file.about("journals") or {}) | self._began

    def close(self) -> None:
        """Close the file, so that it is complete and can be copied."""
        file, self._file = self._file, None
        # Forget the gaps, which are read again from the file when it is reopened.
        self._gaps = []
        if file is not None:
            file.close()

    # -- input

    def learn(self, state: State) -> None:
        """Learn which processes have ended. Call it before `feed` adds the steps of their
        successors."""
        self.time.learn(self._with_beginnings(state).processes)

    def feed(self, batch: Batch) -> None:
        """Add a batch. Skip records that the file already has: a restarted agent reads some
        twice."""
        news, process = batch.news, batch.process
        rank, journal = process.rank, process.journal
        began_ns = self._began.setdefault(journal, process.began_ns)
        # The times of a remote process shift when the measured clock offset changes. Convert them
        # to the first measured offset, which the stored times use.
        shift_ns = began_ns - process.began_ns
        self.time.begin(process._replace(began_ns=began_ns), trains=bool(news.steps))
        attempt, new = self.time.attempts.of(began_ns), self._new
        position, host_ns, device_ns = new.positions.get(
            journal, self._positions.get(journal, (0, 0, 0))
        )
        if position < batch.since:
            why = f"records of rank {rank} were read while nothing could be written"
            self.leave_out(max(host_ns, began_ns), time.time_ns(), why)
        self._add_values(batch, [each for each in news.scalars if each.position >= position])
        for document in news.events:
            if document.position >= position:
                self._add_event(rank, document)
        for clock, steps, after_ns in (
            ("host", news.estimated, host_ns),
            ("device", news.device_estimated, device_ns),
        ):
            unread = [each for each in steps if each.ended_ns + shift_ns > after_ns]
            self._add_steps(rank, clock, self.time.feed(rank, clock, unread, attempt))
        for since_ns, until_ns in news.overwritten:
            why = f"records of rank {rank} were overwritten before they were read"
            # The missing records were most likely in the longest pause between the steps that were
            # read, so take this pause as the gap. Without steps, take the whole interval.
            ends = [max(since_ns, host_ns), *(each.ended_ns for each in news.steps)]
            begins = [each.began_ns for each in news.steps] or [until_ns]
            pause = max(zip(ends, begins, strict=False), key=lambda each: each[1] - each[0])
            self.leave_out(*pause, why)
        new.positions[journal] = (
            max(position, batch.position),
            max([host_ns, *(each.ended_ns + shift_ns for each in news.steps)]),
            max([device_ns, *(each.ended_ns + shift_ns for each in news.device_steps)]),
        )

    def feed_state(self, state: State) -> None:
        """Use this snapshot of the run from now on, and add its new samples."""
        state = self._with_beginnings(state)
        for node, since_ns in state.about.get("nodes", {}).items():
            self._nodes[node] = min(since_ns, self._nodes.get(node, since_ns))
        self._state = state.after(self._state)._replace(samples=(), processes=())
        for released in self.time.note(state.processes, state.verdicts, time.time_ns()):
            self._add_steps(*released)
        for sample in state.samples:
            if self._sampled.get(sample.key) == sample.time_ns:
                continue  # not a new reading
            self._sampled[sample.key] = sample.time_ns
            row = value_row(sample.time_ns // _S, sample.time_ns, sample.value, None)
            self._new.rows.setdefault(sample.key, []).append(row)

    def _with_beginnings(self, state: State) -> State:
        """The snapshot, with the beginning of each process as it was first measured."""
        began, ranks = self._began, dict(state.ranks)
        for rank, each in ranks.items():
            if "journal" in each:
                known_ns = began.setdefault(_journal_of(each), each["started_ns"])
                ranks[rank] = {**each, "started_ns": known_ns}
        processes = [
            each._replace(began_ns=began.setdefault(each.journal, each.began_ns))
            for each in state.processes
        ]
        return state._replace(ranks=ranks, processes=processes)

    def _add_values(self, batch: Batch, records: Iterable[Scalars]) -> None:
        # Hot path: this runs for each value of each rank. So a series is looked up only once per
        # name between two writes.
        new, names = self._new, batch.names
        rank = batch.process.rank
        known = new.named.setdefault((batch.process.journal, rank), {})
        for record in records:
            time_ns, epoch = record.time_ns, record.epoch
            for number, value in zip(record.names, record.values, strict=True):
                series = known.get(number)
                if series is None:
                    if (name := names.get(number)) is None:
                        continue
                    key = SeriesKey("value", name.text, rank, (("split", name.split),))
                    series = known[number] = key, new.rows.setdefault(key, [])
                key, rows = series
                step = record.step
                if step is None:
                    # Values without a step get consecutive numbers instead.
                    step = self._counts[key] = self._count(key) + 1
                rows.append(value_row(step, time_ns, value, epoch))

    def _count(self, key: SeriesKey) -> int:
        """The number that the last value of a series has, which an earlier agent may have written;
        -1 if it has no value."""
        if key in self._counts:
            return self._counts[key]
        return -1 if self._file is None else self._file.last(key)

    def _add_steps(self, rank: str, clock: str, steps: Iterable[Placed]) -> None:
        rows: list[Row] = []
        for step, number, _ in steps:
            # A report of another node may contain any number. Skip huge ones, as their sums would
            # not fit into a column.
            if not 0 < step.ended_ns - step.began_ns < _LONGEST_STEP_NS or step.work > _MOST_WORK:
                continue
            _, codes, spans_ns = step.parts
            unusual = step.skipped or _is_unusual(codes)
            times = number, step.began_ns, step.ended_ns
            rows.append(step_row(*times, codes, spans_ns, step.work, unusual))
        if rows:
            self._new.rows.setdefault(SeriesKey("steps", clock, rank), []).extend(rows)

    def _add_event(self, rank: str, document: Document) -> None:
        content = document.content
        time_ns = plain.whole(content.get("time"))
        if time_ns is None:
            return  # a record of another version
        row = Event(
            time_ns,
            plain.whole(content.get("step")),
            rank,
            str(content.get("name") or "")[:200],
            str(content.get("severity") or "INFO")[:40],
            str(content.get("body") or content.get("name") or "")[:_LONGEST_BODY],
            plain.mapping(content.get("attributes")),
        )
        self._new.events.append(row)

    # -- writing

    def write(self, now_ns: int) -> None:
        """Write everything that waits.

        If that fails and too many rows wait, drops them. Raises sqlite3.Error, OSError or Unusable.
        """
        try:
            self.open()
            assert self._file is not None
            self._write(self._file, now_ns)
        except (sqlite3.Error, OSError, ValueError, OverflowError) as why:
            if not self.failing[0]:
                self.failing = now_ns, getattr(why, "strerror", None) or str(why)
            # A damaged journal may contain a number that fits no column. All later writes would
            # fail, so drop the rows in this case, too.
            if self._new.size > _MOST_WAITING or isinstance(why, OverflowError):
                self.leave_out(self.failing[0], now_ns, self.failing[1])
                # Keep the offsets: the dropped rows must not be read again.
                positions, self._new = self._new.positions, _Unwritten()
                self._new.positions = positions
            raise
        self.failing = 0, ""

    def _write(self, file: RunFile, now_ns: int) -> None:
        state, before = self._state, self._written
        counted = {"gaps": self._gaps, "journals": {**self._began}, **self.time.to_json()}
        about = {"seen_ns": now_ns, **state.about, **counted}
        if self._nodes:
            about["nodes"] = {**self._nodes}
        if self._began_ns and "began_ns" in about:
            # After a restart of the agent, the run's first processes may be unknown. The earlier
            # beginning is right.
            about["began_ns"] = min(self._began_ns, about["began_ns"])
        self._began_ns = about.get("began_ns", self._began_ns)
        changed = {key: v for key, v in about.items() if before.about.get(key, ...) != v}
        ranks = {rank: each for rank, each in state.ranks.items() if before.ranks.get(rank) != each}
        known = [*before.verdicts]
        verdicts = [each for each in state.verdicts if each not in known]
        new = self._new
        if not (new.positions or new.rows or ranks or verdicts or changed.keys() > {"seen_ns"}):
            return
        file.write(
            rows=new.rows,
            about=changed,
            ranks=ranks,
            events=new.events,
            verdicts=verdicts,
            positions=new.positions,
            attempt_ns=self.time.attempts.began_ns,
        )
        self._positions = self._positions | new.positions
        self._new = _Unwritten()
        self._note_written()
        self._written = state._replace(about=about)

    def leave_out(self, since_ns: int, until_ns: int, why: str) -> None:
        """Record a gap, i.e. that data of this interval is missing, and why."""
        gap = {"since_ns": since_ns, "until_ns": until_ns, "why": why}
        # If the last gap has the same cause and ended recently, extend it instead.
        for last in self._gaps[-1:]:
            if last["why"] == why and since_ns - last["until_ns"] < _ONE_GAP_NS:
                gap = {**last, "until_ns": max(until_ns, last["until_ns"])}
                del self._gaps[-1]
        self._gaps = [*self._gaps, gap][-_MOST_GAPS:]
