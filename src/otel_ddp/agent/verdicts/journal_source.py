"""A process of this node as the judge sees it: by its journal, its answers and the kernel."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp.agent.reading.journal_feed import JournalFeed, News
from otel_ddp.agent.verdicts.answers import Answers
from otel_ddp.agent.verdicts.observe import ExitCauses
from otel_ddp.agent.verdicts.source import Source
from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.detector import Memory, NonfiniteValue, RankState
from otel_ddp.diagnosis.stall.evidence import Evidence, Position, Question
from otel_ddp.diagnosis.step_facts import DeviceStep, TimedStep
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.journal.parser import Name, Scalars, Unreadable
from otel_ddp.journal.process_state import ENDED, ProcessState
from otel_ddp.journal.reader import JournalReader
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import PHASES, phase_word, state_word

# A single infinite gradient norm is part of finding a loss scale. Two in a row are not, nor is one
# without a successor for so long.
_WITHOUT_SUCCESSOR_NS = 60 * 10**9


class JournalSources:
    """One per node: the processes whose labels are known."""

    def __init__(self, causes: ExitCauses) -> None:
        self._causes = causes
        self._sources: dict[JournalFeed, JournalSource] = {}

    def of(self, journals: Iterable[JournalFeed]) -> Collection[JournalSource]:
        """One for each of these journals; a new one where its labels have changed."""
        before = self._sources
        self._sources = {}
        for each in journals:
            if each.labels:
                known = before.get(each)
                if known is None or known.labels != each.labels:
                    known = JournalSource(each, self._causes)
                self._sources[each] = known
        return self._sources.values()


class JournalSource(Source):
    """One process, from when its labels are known until its journal is closed."""

    is_here = has_news = True
    is_left_out = False

    def __init__(self, journal: JournalFeed, causes: ExitCauses) -> None:
        reader = journal.reader
        self.labels: Labels = journal.labels
        self._journal = journal
        self._causes = causes
        self._process = journal.pid, reader.start_ticks
        self._fed: News | None = None
        self._values = NonfiniteValues()
        self._values.read_before(reader.path, reader.position)
        self._where = Answers(reader.path, *self._process)
        self._when = Answers(reader.path, *self._process)
        self.watch()

    @property
    def began_ns(self) -> int:
        return int(self._journal.reader.created_ns)

    @property
    def is_at_work(self) -> bool:
        return self._journal.ended_at is None

    @property
    def trains(self) -> bool:
        return self._journal.restarted

    @property
    def project(self) -> str:
        return self._journal.project

    @property
    def journal(self) -> Path:
        return self._journal.reader.path

    @property
    def global_rank(self) -> int | None:
        found = self._journal.identity.get("global_rank")
        return found if isinstance(found, int) else None

    def fact(self, name: str) -> Any:
        """What the process has said of itself; None: nothing."""
        return self._journal.reader.facts.get(name)

    def state(self) -> RankState:
        reader = self._journal.reader
        found = reader.facts.get("capability")
        # By what a process cannot do: why it cannot, or nothing.
        missing: Mapping[str, Any] = found if isinstance(found, dict) else {}
        own = reader.facts.get("own_collectives")
        return RankState(
            self.labels,
            own_world_size=self._journal.world_size,
            waits_known=not missing["comm_wait"] if "comm_wait" in missing else None,
            own_collectives=tuple(each for each in own if isinstance(each, str) and each in PHASES)
            if isinstance(own, list)
            else (),
            device_clock=not missing["device_clock"] if "device_clock" in missing else None,
            under_nccl="nccl" in str(reader.facts.get("backend")),
            began_ns=self.began_ns,
            clock_shift_ns=reader.created_monotonic_ns - reader.created_ns,
        )

    def steps(self) -> tuple[Sequence[TimedStep], Sequence[DeviceStep]]:
        return self._journal.new.steps, self._journal.new.device_steps

    def position(self, origin_ns: int) -> Position | None:
        reader = self._journal.reader
        progress = reader.progress()
        if progress is None:
            return None
        phase = phase_word(progress.phase_code)
        name = reader.names.get(progress.phase_name) if phase == "other" else None
        return Position(
            labels=self.labels,
            alive=self.is_at_work,
            state=state_word(self._journal.state),
            step=self._journal.step(),
            phase=phase,
            in_mark=reader.in_mark(),
            waits_in=self.state().waits_in,
            # On the host's monotonic clock, which the process and the agent share.
            since_ns=origin_ns + reader.created_monotonic_ns + progress.phase_after_ns,
            name="" if name is None else name.text,
            expect_s=progress.expect_ms / 1000 if progress.expect_ms else None,
            written=reader.position,
            world=self._journal.world_size,
        )

    # -- what is read beside the journal

    def watch(self) -> None:
        if self.is_at_work:
            self._causes.watch(*self._process)

    def memory(self) -> Memory | None:
        return self._causes.memory(*self._process)

    def device_memory(self) -> Memory | None:
        found = {each.metric: each.values[0] for each in self._journal.reader.totals()}
        used = found.get(catalog.TRAINING_DEVICE_MEMORY_ALLOCATED.name, math.nan)
        limit = found.get(catalog.TRAINING_DEVICE_MEMORY_LIMIT.name, math.nan)
        return Memory(round(used), round(limit)) if math.isfinite(used + limit) else None

    def nonfinite(self, now_ns: int) -> Sequence[NonfiniteValue]:
        # The judge of this node reads it, and so does what tells the lead of the run.
        if self._journal.new is not self._fed:
            self._fed = self._journal.new
            self._values.feed(self._fed.scalars, now_ns)
        return self._values.find(self._journal.reader.names, now_ns, ended=not self.is_at_work)

    def ask(self, question: Question, now_ns: int) -> bool:
        return (self._when if question == "when" else self._where).ask(question, now_ns)

    def evidence(self, now_ns: int) -> Evidence:
        return self._where.poll(now_ns)

    def arrivals(self, now_ns: int) -> Mapping[str, Any] | None:
        return self._when.content if self._when.poll(now_ns).silent_s is None else None

    # -- its end

    @property
    def ended_ns(self) -> int:
        """When it ended, by its own report if there is one."""
        return self._reported_end_ns() or self._journal.life.gone_ns

    def _reported_end_ns(self) -> int:
        progress = self._journal.reader.progress()
        return 0 if progress is None or progress.state not in ENDED else progress.state_since_ns

    def end(self) -> EndedProcess:
        journal, described = self._journal, self._journal.describe()
        alive_ns, ended_ns = journal.life.seen_alive_ns, journal.life.gone_ns
        if reported_ns := self._reported_end_ns():
            alive_ns = ended_ns = reported_ns
        return EndedProcess(
            labels=self.labels,
            state=described.state,
            step=described.step,
            phase=described.phase,
            phase_since_ns=described.phase_since_ns,
            seen_alive_ns=alive_ns,
            ended_ns=ended_ns,
            reason=described.reason,
            cause=self.cause(),
            world_size=journal.world_size,
        )

    def cause(self) -> Mapping[str, Any]:
        return self._causes.why(*self._process)

    def present_ns(self) -> int:
        return time.time_ns() if self._causes.is_there(*self._process) else 0

    def close(self) -> None:
        self._causes.forget(*self._process)

    def describe(self) -> ProcessState:
        return self._journal.describe()


class _Lost(NamedTuple):
    """The first value of a name that was not finite, after one that was."""

    value: float
    record: Scalars
    finite_step: int | None
    seen_ns: int
    has_successor: bool = False


class NonfiniteValues:
    """The values of one process that were finite once, and no longer are."""

    def __init__(self) -> None:
        # By name: the step of its last finite value.
        self._finite: dict[int, int | None] = {}
        self._lost: dict[int, _Lost] = {}

    def read_before(self, path: Path, position: int) -> None:
        """Learn which names were finite before this position: another agent may have read that."""
        try:
            reader = JournalReader(path)
        except Unreadable:
            return
        try:
            while reader.position < position and (records := reader.read()):
                for record in records:
                    if isinstance(record, Scalars):
                        finite = [name for name, value in record.values if math.isfinite(value)]
                        self._finite.update(dict.fromkeys(finite, record.step))
        finally:
            reader.close()

    def feed(self, records: Iterable[Scalars], now_ns: int) -> None:
        """Those that are new."""
        finite, lost, isfinite = self._finite, self._lost, math.isfinite
        for record in records:
            step = record.step
            for name, value in record.values:
                if isfinite(value):
                    finite[name] = step
                    if lost:
                        lost.pop(name, None)
                elif name in self._lost:
                    self._lost[name] = self._lost[name]._replace(has_successor=True)
                elif name in self._finite:
                    self._lost[name] = _Lost(value, record, self._finite[name], now_ns)

    def find(
        self, names: Mapping[int, Name], now_ns: int, ended: bool = False
    ) -> list[NonfiniteValue]:
        """What is known of the names whose values are lost for sure."""
        return [
            NonfiniteValue(
                *(named.text, named.split, lost.value, lost.record.step),
                *(lost.record.time_ns, lost.finite_step),
            )
            for name, lost in self._lost.items()
            if (named := names.get(name)) is not None
            and (ended or lost.has_successor or now_ns - lost.seen_ns >= _WITHOUT_SUCCESSOR_NS)
        ]
