"""The desk where verdicts are reached: feeds the detectors of each run, and asks them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from otel_ddp import catalog, containment
from otel_ddp.agent.arrivals import Arrivals
from otel_ddp.agent.causes import Causes
from otel_ddp.agent.intake import Intake
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.logged import LoggedValues
from otel_ddp.agent.parents import Parents
from otel_ddp.agent.probe import Probe
from otel_ddp.agent.room import Room, said
from otel_ddp.agent.steps import Step
from otel_ddp.agent.teller import Teller, plain
from otel_ddp.agent.verdict_series import VerdictSeries
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

    def __init__(self, intake: Intake) -> None:
        reader = intake.reader
        self.who: Who = intake.labels
        self.probe = Probe(reader.path, intake.pid, reader.start_ticks)
        self.values = LoggedValues(reader)
        self.told_gone = False
        self.memory_at = 0


class Desk:
    """One a node; called from the agent's loop alone, with what it has just read."""

    def __init__(
        self,
        ledger: Ledger,
        floor_s: float,
        postmortems: Path,
        clock: Callable[[], int] = time.monotonic_ns,
        gpus: Callable[[], Sequence[Gpu]] = tuple,
    ) -> None:
        """*gpus*: the node's devices as they are known now."""
        self._ledger = ledger
        self._clock = clock
        self._floor_s = floor_s
        self._rooms: dict[Who, Room] = {}
        self._seats: dict[Intake, _Seat] = {}
        self._causes = Causes()
        self.parents = Parents(self._causes)
        self._look_at = self._watch_at = 0
        # The clock of all that is said here: set once, and going on without jumps.
        self._origin_ns = time.time_ns() - clock()
        self._teller = Teller(ledger, postmortems, gpus)
        self._series = VerdictSeries(ledger, self._origin_ns)

    @containment.contained()
    def take(self, intakes: Iterable[Intake]) -> None:
        """What the processes have told since the last time, and where they stand now."""
        now_ns = self._origin_ns + self._clock()
        # Of two with one name the newer one is the one that stands there.
        known = [each for each in intakes if each.labels and not each.is_proxy]
        known.sort(key=lambda each: each.reader.created_ns)
        for gone in self._seats.keys() - set(known):
            self._seats.pop(gone)
        ended = False
        for intake in known:
            ended |= self._take_one(intake)
        known = [each for each in known if each in self._seats]
        if now_ns >= self._watch_at:
            self._watch_at = now_ns + _WATCH_NS
            for intake in known:
                if intake.ended_at is None:
                    self._watch(intake, now_ns)
        if ended or now_ns >= self._look_at:
            self._look_at = now_ns + _LOOK_NS
            for room in list(self._rooms.values()):
                self._look(
                    room, [each for each in known if run_of(each.labels) == room.run], now_ns
                )

    @containment.contained()
    def _watch(self, intake: Intake, now_ns: int) -> None:
        seat = self._seats[intake]
        pid = intake.pid, intake.reader.start_ticks
        self._causes.watch(*pid)
        room = self._rooms[run_of(seat.who)]
        room.nonfinite.feed(seat.who, seat.values.odd(now_ns))
        if now_ns >= seat.memory_at:
            seat.memory_at = now_ns + _MEMORY_NS
            if (memory := self._causes.memory(*pid)) is not None:
                room.creep.limit(seat.who, memory.limit_bytes)
                room.creep.feed(seat.who, memory.private_bytes, now_ns)

    @containment.contained(default=False)
    def _take_one(self, intake: Intake) -> bool:
        """Feed its steps to the detectors; whether it has ended since it was last looked at."""
        seat = self._seats.get(intake)
        if seat is None or seat.who != intake.labels:
            if seat is not None and (left := self._rooms.get(run_of(seat.who))) is not None:
                left.leave(seat.who)
            seat = self._seats[intake] = _Seat(intake)
            self._causes.watch(intake.pid, intake.reader.start_ticks)
        run = run_of(seat.who)
        room = self._rooms.get(run)
        if room is None:
            room = self._rooms[run] = Room(run, self._floor_s, self._causes)
        room.goes_on(intake.reader.created_ns)
        if not room.node:
            # The first one's: of two nodes on one host the series would jump from one to the other.
            room.node = tuple(pair for pair in seat.who if pair[0] in catalog.NODE_LABELS)
        steps = intake.fresh_steps()
        if intake.ended_at is None:
            room.hear_of_world(seat.who, intake, trains=bool(steps) or intake.restarted)
        if not room.is_beside(intake.world_size):
            room.stragglers.is_here(seat.who)
            room.hear_of_waits(seat.who, intake)
            room.hear_of_own_collectives(seat.who, intake)
            if steps:
                self._compare(room, seat.who, intake, steps)
        ended = intake.ended_at is not None and not seat.told_gone
        if ended:
            # The last thing that it said may be why.
            now_ns = self._origin_ns + self._clock()
            room.nonfinite.feed(seat.who, seat.values.odd(now_ns, ended=True))
        return ended

    def _compare(self, room: Room, who: Who, intake: Intake, steps: Sequence[Step]) -> None:
        room.report_is_old = True
        room.goes_on(steps[-1].began_ns)
        _listen(room.arrivals, who, intake, steps)
        runs = alike(steps)
        _learn(room.stalls, self._origin_ns + self._clock(), who, runs)
        facts = [each for stretch in runs for each in facts_of(stretch)]
        _feed(room.stragglers, who, facts)
        _feed(room.bounds, who, facts)

    # -- looking

    def _look(self, room: Room, intakes: list[Intake], now_ns: int) -> None:
        room.moved, room.leaving = None, []
        looks: tuple[Callable[[], list[Change]], ...] = (
            lambda: self._deaths(room, intakes, now_ns),
            lambda: self._stalls(room, intakes, now_ns),
            room.stragglers.look,
            lambda: room.arrivals.look(now_ns, not room.stalls.suspects),
            room.bounds.look,
            room.creep.look,
            lambda: room.nonfinite.look(now_ns),
        )
        # All are asked before anything is told: post-mortems say what else was found.
        for change in [each for look in looks for each in _found(look)]:
            self._teller.tell(room, change, intakes, now_ns)

    def _stalls(self, room: Room, intakes: list[Intake], now_ns: int) -> list[Change]:
        # Those who have ended first: who lives may have the name of one of them.
        # Those of a larger world may have finished, and this process lives on without them.
        positions = [
            position
            for position, _ in room.ended.values()
            if position.world is None or position.world >= room.world_size
        ]
        evidence: dict[Who, Evidence] = {}
        for intake in intakes:
            if intake.ended_at is not None or room.is_beside(intake.world_size):
                continue
            seat = self._seats[intake]
            position = self._position(intake, seat)
            if position is not None:
                positions.append(position)
            # It costs a file a thread: only where there is a suspicion.
            if seat.who in room.stalls.suspects:
                evidence[seat.who] = seat.probe.look(now_ns)
        room.heard = {who: each.groups for who, each in evidence.items() if each.groups}
        changes = room.stalls.look(now_ns, positions, evidence)
        for intake in intakes:
            seat = self._seats[intake]
            if (question := room.stalls.questions.get(seat.who)) and intake.ended_at is None:
                seat.probe.ask(question, now_ns)
        return changes

    def _position(self, intake: Intake, seat: _Seat) -> Position | None:
        progress = intake.reader.progress()
        if progress is None:
            return None
        reader = intake.reader
        phase = _PHASES.get(progress.phase_code, "other")
        name = reader.names.get(progress.phase_name) if phase == "other" else None
        return Position(
            who=seat.who,
            alive=intake.ended_at is None,
            state=_STATES.get(intake.state, "running"),
            step=intake.step(),
            phase=phase,
            # On the clock that both of us count on: the host's since it was started.
            since_ns=self._origin_ns + reader.created_monotonic_ns + progress.phase_after_ns,
            name="" if name is None else name.text,
            expect_s=progress.expect_ms / 1000 if progress.expect_ms else None,
            written=reader.position,
            world=intake.world_size,
        )

    # -- deaths

    def _deaths(self, room: Room, intakes: list[Intake], now_ns: int) -> list[Change]:
        changes: list[Change] = []
        found = []
        at_work = {self._seats[each].who for each in intakes if each.ended_at is None}
        for intake in intakes:
            seat = self._seats[intake]
            if intake.ended_at is None:
                if room.endings.take_back(seat.who):
                    changes += room.deaths.alive(seat.who)
                continue
            if seat.told_gone:
                continue
            seat.told_gone = True
            if seat.who in at_work:
                # It was followed before we came to know of its end.
                self._causes.forget(intake.pid, intake.reader.start_ticks)
                continue
            room.leave(seat.who)
            room.leaving.append(seat.who)
            gone = room.endings.take(intake, seat.who, now_ns)
            found.append(gone)
            room.last[seat.who] = said(intake)
            if (position := self._position(intake, seat)) is not None:
                room.ended[seat.who] = position, gone.gone_ns
        room.endings.look()
        found += room.endings.reconsidered(now_ns)
        if not found:
            return changes
        beside = {self._seats[e].who for e in intakes if room.is_beside(e.world_size)}
        return changes + room.deaths.gone(found, at_work - beside)

    def handles(self) -> list[int]:
        """Descriptors that become readable when a process dies."""
        return self._causes.handles()

    def documents(self) -> list[tuple[Labels, str, list[Document]]]:
        """What is to be exported, once."""
        return self._teller.documents()

    # -- standing

    def stand(self, now_ns: int) -> None:
        """Bring the series up to date. The caller holds the ledger's lock."""
        for room in self._rooms.values():
            self._series.stand(room, now_ns)

    def retire(self, runs: set[Who]) -> None:
        """Forget the runs of which nothing is left to show."""
        for run in [each for each in self._rooms if each not in runs]:
            room = self._rooms.pop(run)
            room.endings.think_no_more()
            self._teller.forget(run)
            with self._ledger.lock:
                self._ledger.drop(room.run)

    def verdicts(self) -> list[dict[str, Any]]:
        """What is open, for the status."""
        # Asked for by the endpoint's threads too, while the loop goes on: each list is a copy.
        rooms = list(self._rooms.values())
        return [plain(each) for room in rooms for each in list(room.verdicts.values())][-_KEPT:]

    def told(self) -> list[str]:
        """What was ever found, also where it is over."""
        return self._teller.told()[-_KEPT:]

    def insufficient(self) -> list[dict[str, str]]:
        """Runs of which nothing can be said, and why."""
        return [
            {**dict(run), "why": room.report.insufficient}
            for run, room in list(self._rooms.items())
            if room.report is not None and room.report.insufficient
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
def _listen(arrivals: Arrivals, who: Who, intake: Intake, steps: Sequence[Step]) -> None:
    arrivals.take(who, intake, steps)


@containment.contained(default=())
def _found(look: Callable[[], Iterable[Change]]) -> Iterable[Change]:
    return look()
