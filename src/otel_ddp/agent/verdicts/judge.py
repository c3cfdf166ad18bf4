"""The desk where verdicts are reached: feeds the detectors of each run, and asks them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from otel_ddp import catalog, containment
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.reading.steps import Step
from otel_ddp.agent.verdicts.arrivals import Arrivals
from otel_ddp.agent.verdicts.exit_causes import ExitCauses
from otel_ddp.agent.verdicts.nonfinite_values import NonfiniteValues
from otel_ddp.agent.verdicts.reports import VerdictReporter, plain
from otel_ddp.agent.verdicts.run_case import RunCase, said
from otel_ddp.agent.verdicts.series import VerdictSeries
from otel_ddp.agent.verdicts.stack_question import StackQuestion
from otel_ddp.catalog import PHASES, STATES
from otel_ddp.diagnosis.bounds import Bounds
from otel_ddp.diagnosis.evidence import Evidence, Position
from otel_ddp.diagnosis.facts import Run, StepFacts, alike, facts_of, run_of
from otel_ddp.diagnosis.hardware import Gpu
from otel_ddp.diagnosis.stall import Stalls
from otel_ddp.diagnosis.straggler import Stragglers
from otel_ddp.diagnosis.verdict import Change, Who
from otel_ddp.journal.reader import Document

_LOOK_NS = 500_000_000
_WATCH_NS = 2_000_000_000
_MEMORY_NS = 10_000_000_000
_KEPT = 100
_PHASES = {code: word for word, code in PHASES.items()}
_STATES = {code: word for word, code in STATES.items()}


class _Seat:
    """One process, from when it is known who it is until its journal goes."""

    def __init__(self, journal: JournalFeed) -> None:
        reader = journal.reader
        self.who: Who = journal.labels
        self.probe = StackQuestion(reader.path, journal.pid, reader.start_ticks)
        self.values = NonfiniteValues(reader)
        self.told_gone = False
        self.memory_at = 0


class Judge:
    """One a node; called from the agent's loop alone, with what it has just read."""

    def __init__(
        self,
        ledger: Ledger,
        floor_s: float,
        postmortems: Path,
        causes: ExitCauses,
        clock: Callable[[], int] = time.monotonic_ns,
        gpus: Callable[[], Sequence[Gpu]] = tuple,
    ) -> None:
        """*gpus*: the node's devices as they are known now."""
        self._ledger = ledger
        self._clock = clock
        self._floor_s = floor_s
        self._cases: dict[Who, RunCase] = {}
        self._seats: dict[JournalFeed, _Seat] = {}
        self._causes = causes
        self._look_at = self._watch_at = 0
        # The clock of all that is said here: set once, and going on without jumps.
        self._origin_ns = time.time_ns() - clock()
        self._reporter = VerdictReporter(ledger, postmortems, gpus)
        self._series = VerdictSeries(ledger, self._origin_ns)

    @containment.contained()
    def poll(self, journals: Iterable[JournalFeed]) -> None:
        """What the processes have told since the last time, and where they stand now."""
        now_ns = self._origin_ns + self._clock()
        # Of two with one name the newer one is the one that stands there.
        known = [each for each in journals if each.labels and not each.is_proxy]
        known.sort(key=lambda each: each.reader.created_ns)
        for gone in self._seats.keys() - set(known):
            self._seats.pop(gone)
        ended = False
        for journal in known:
            ended |= self._take_one(journal)
        known = [each for each in known if each in self._seats]
        if now_ns >= self._watch_at:
            self._watch_at = now_ns + _WATCH_NS
            for journal in known:
                if journal.ended_at is None:
                    self._watch(journal, now_ns)
        if ended or now_ns >= self._look_at:
            self._look_at = now_ns + _LOOK_NS
            for case in list(self._cases.values()):
                self._look(
                    case, [each for each in known if run_of(each.labels) == case.run], now_ns
                )

    @containment.contained()
    def _watch(self, journal: JournalFeed, now_ns: int) -> None:
        seat = self._seats[journal]
        pid = journal.pid, journal.reader.start_ticks
        self._causes.watch(*pid)
        case = self._cases[run_of(seat.who)]
        case.nonfinite.feed(seat.who, seat.values.odd(now_ns))
        if now_ns >= seat.memory_at:
            seat.memory_at = now_ns + _MEMORY_NS
            if (memory := self._causes.memory(*pid)) is not None:
                case.creep.limit(seat.who, memory.limit_bytes)
                case.creep.feed(seat.who, memory.private_bytes, now_ns)

    @containment.contained(default=False)
    def _take_one(self, journal: JournalFeed) -> bool:
        """Feed its steps to the detectors; whether it has ended since it was last looked at."""
        seat = self._seats.get(journal)
        if seat is None or seat.who != journal.labels:
            if seat is not None and (left := self._cases.get(run_of(seat.who))) is not None:
                left.leave(seat.who)
            seat = self._seats[journal] = _Seat(journal)
            self._causes.watch(journal.pid, journal.reader.start_ticks)
        run = run_of(seat.who)
        case = self._cases.get(run)
        if case is None:
            case = self._cases[run] = RunCase(run, self._floor_s, self._causes)
        case.goes_on(journal.reader.created_ns)
        if not case.node:
            # The first one's: of two nodes on one host the series would jump from one to the other.
            case.node = tuple(pair for pair in seat.who if pair[0] in catalog.NODE_LABELS)
        steps = journal.flush_steps()
        if journal.ended_at is None:
            case.hear_of_world(seat.who, journal, trains=bool(steps) or journal.restarted)
        if not case.is_beside(journal.world_size):
            case.stragglers.is_here(seat.who)
            case.hear_of_waits(seat.who, journal)
            case.hear_of_own_collectives(seat.who, journal)
            if steps:
                self._compare(case, seat.who, journal, steps)
        ended = journal.ended_at is not None and not seat.told_gone
        if ended:
            # The last thing that it said may be why.
            now_ns = self._origin_ns + self._clock()
            case.nonfinite.feed(seat.who, seat.values.odd(now_ns, ended=True))
        return ended

    def _compare(
        self, case: RunCase, who: Who, journal: JournalFeed, steps: Sequence[Step]
    ) -> None:
        case.report_is_old = True
        case.goes_on(steps[-1].began_ns)
        _listen(case.arrivals, who, journal, steps)
        runs = alike(steps)
        _learn(case.stalls, self._origin_ns + self._clock(), who, runs)
        facts = [each for stretch in runs for each in facts_of(stretch)]
        _feed(case.stragglers, who, facts)
        _feed(case.bounds, who, facts)

    # -- looking

    def _look(self, case: RunCase, journals: list[JournalFeed], now_ns: int) -> None:
        case.moved, case.leaving = None, []
        looks: tuple[Callable[[], list[Change]], ...] = (
            lambda: self._deaths(case, journals, now_ns),
            lambda: self._stalls(case, journals, now_ns),
            case.stragglers.poll,
            lambda: case.arrivals.poll(now_ns, not case.stalls.suspects),
            case.bounds.poll,
            case.creep.poll,
            lambda: case.nonfinite.poll(now_ns),
        )
        # All are asked before anything is told: post-mortems say what else was found.
        for change in [each for look in looks for each in _found(look)]:
            self._reporter.report(case, change, journals, now_ns)

    def _stalls(self, case: RunCase, journals: list[JournalFeed], now_ns: int) -> list[Change]:
        # Those who have ended first: who lives may have the name of one of them.
        # Those of a larger world may have finished, and this process lives on without them.
        positions = [
            position
            for position, _ in case.ended.values()
            if position.world is None or position.world >= case.world_size
        ]
        evidence: dict[Who, Evidence] = {}
        for journal in journals:
            if journal.ended_at is not None or case.is_beside(journal.world_size):
                continue
            seat = self._seats[journal]
            position = self._position(journal, seat)
            if position is not None:
                positions.append(position)
            # It costs a file a thread: only where there is a suspicion.
            if seat.who in case.stalls.suspects:
                evidence[seat.who] = seat.probe.poll(now_ns)
        case.heard = {who: each.groups for who, each in evidence.items() if each.groups}
        changes = case.stalls.poll(now_ns, positions, evidence)
        for journal in journals:
            seat = self._seats[journal]
            if (question := case.stalls.questions.get(seat.who)) and journal.ended_at is None:
                seat.probe.ask(question, now_ns)
        return changes

    def _position(self, journal: JournalFeed, seat: _Seat) -> Position | None:
        progress = journal.reader.progress()
        if progress is None:
            return None
        reader = journal.reader
        phase = _PHASES.get(progress.phase_code, "other")
        name = reader.names.get(progress.phase_name) if phase == "other" else None
        return Position(
            who=seat.who,
            alive=journal.ended_at is None,
            state=_STATES.get(journal.state, "running"),
            step=journal.step(),
            phase=phase,
            # On the clock that both of us count on: the host's since it was started.
            since_ns=self._origin_ns + reader.created_monotonic_ns + progress.phase_after_ns,
            name="" if name is None else name.text,
            expect_s=progress.expect_ms / 1000 if progress.expect_ms else None,
            written=reader.position,
            world=journal.world_size,
        )

    # -- deaths

    def _deaths(self, case: RunCase, journals: list[JournalFeed], now_ns: int) -> list[Change]:
        changes: list[Change] = []
        found = []
        at_work = {self._seats[each].who for each in journals if each.ended_at is None}
        for journal in journals:
            seat = self._seats[journal]
            if journal.ended_at is None:
                if case.endings.take_back(seat.who):
                    changes += case.deaths.alive(seat.who)
                continue
            if seat.told_gone:
                continue
            seat.told_gone = True
            if seat.who in at_work:
                # It was followed before we came to know of its end.
                self._causes.forget(journal.pid, journal.reader.start_ticks)
                continue
            case.leave(seat.who)
            case.leaving.append(seat.who)
            gone = case.endings.feed(journal, seat.who, now_ns)
            found.append(gone)
            case.last[seat.who] = said(journal)
            if (position := self._position(journal, seat)) is not None:
                case.ended[seat.who] = position, gone.gone_ns
        case.endings.poll()
        found += case.endings.reconsidered(now_ns)
        if not found:
            return changes
        beside = {self._seats[e].who for e in journals if case.is_beside(e.world_size)}
        return changes + case.deaths.gone(found, at_work - beside)

    def flush_documents(self) -> list[tuple[Labels, str, list[Document]]]:
        """What is to be exported, once."""
        return self._reporter.flush_documents()

    # -- standing

    def update_series(self, now_ns: int) -> None:
        """Bring the series up to date. The caller holds the ledger's lock."""
        for case in self._cases.values():
            self._series.update_series(case, now_ns)

    def retire(self, runs: set[Who]) -> None:
        """Forget the runs of which nothing is left to show."""
        for run in [each for each in self._cases if each not in runs]:
            case = self._cases.pop(run)
            case.endings.think_no_more()
            self._reporter.forget(run)
            with self._ledger.lock:
                self._ledger.drop(case.run)

    def verdicts(self) -> list[dict[str, Any]]:
        """What is open, for the status."""
        # Asked for by the endpoint's threads too, while the loop goes on: each list is a copy.
        cases = list(self._cases.values())
        return [plain(each) for case in cases for each in list(case.verdicts.values())][-_KEPT:]

    def findings(self) -> list[str]:
        """What was ever found, also where it is over."""
        return self._reporter.findings()[-_KEPT:]

    def insufficient(self) -> list[dict[str, str]]:
        """Runs of which nothing can be said, and why."""
        return [
            {**dict(run), "why": case.report.insufficient}
            for run, case in list(self._cases.items())
            if case.report is not None and case.report.insufficient
        ]


# One detector that breaks takes nothing from the others, and nothing from the other runs.


@containment.contained()
def _learn(stalls: Stalls, now_ns: int, who: Who, runs: Sequence[Run]) -> None:
    longest_ns: dict[str, int] = {}
    for run in runs:
        for code, span_ns in run.longest_ns().items():
            phase = _PHASES.get(code, "other")
            longest_ns[phase] = max(span_ns, longest_ns.get(phase, 0))
    steps = [step for run in runs for step in run.steps]
    steps_s = [(step.ended_ns - step.began_ns) / 1e9 for step in steps]
    stalls.learn(now_ns, who, steps[0].began_ns, steps_s, longest_ns)


@containment.contained()
def _feed(detector: Stragglers | Bounds, who: Who, facts: Sequence[StepFacts]) -> None:
    detector.feed(who, facts)


@containment.contained()
def _listen(arrivals: Arrivals, who: Who, journal: JournalFeed, steps: Sequence[Step]) -> None:
    arrivals.feed(who, journal, steps)


@containment.contained(default=())
def _found(look: Callable[[], Iterable[Change]]) -> Iterable[Change]:
    return look()
