"""The desk where verdicts are reached: feeds the detectors, and tells what they find."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2s
from pathlib import Path
from typing import Any

from otel_ddp import catalog, containment
from otel_ddp.agent import postmortem
from otel_ddp.agent.arrivals import Arrivals
from otel_ddp.agent.causes import Causes
from otel_ddp.agent.intake import Intake
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.logged import LoggedValues
from otel_ddp.agent.probe import Probe
from otel_ddp.agent.steps import Step
from otel_ddp.catalog import PHASES, STATES
from otel_ddp.diagnosis.bounds import Bounds
from otel_ddp.diagnosis.creep import Creep
from otel_ddp.diagnosis.death import Deaths, Gone
from otel_ddp.diagnosis.facts import Run, StepFacts, alike, facts_of
from otel_ddp.diagnosis.hardware import Gpu, with_gpu
from otel_ddp.diagnosis.nonfinite import Nonfinite
from otel_ddp.diagnosis.stall import Evidence, Group, Position, Stalls
from otel_ddp.diagnosis.straggler import Report, Stragglers
from otel_ddp.diagnosis.verdict import Change, Kind, Verdict, Who
from otel_ddp.journal.layout import EVENT, SPAN
from otel_ddp.journal.reader import Document

log = logging.getLogger("otel_ddp.agent")

_LOOK_NS = 500_000_000
_WATCH_NS = 2_000_000_000
_MEMORY_NS = 10_000_000_000
# What the kernel has to say of a death comes when its launcher has looked, every 5 s perhaps.
_AFTERTHOUGHTS_NS = (2_000_000_000, 6_000_000_000)
_KEPT = 100
_PHASES = {code: word for word, code in PHASES.items()}
_STATES = {code: word for word, code in STATES.items()}
_KILLED = STATES["killed"]
# Findings that are no trouble: nobody is to be woken by them.
_CALM: frozenset[Kind] = frozenset({"bound"})


class _Room:
    """What is known of one run on this node."""

    def __init__(self, floor_s: float) -> None:
        self.stragglers = Stragglers()
        self.arrivals = Arrivals()
        self.bounds = Bounds()
        self.stalls = Stalls(floor_s)
        self.deaths = Deaths()
        self.creep = Creep()
        self.nonfinite = Nonfinite()
        self.verdicts: dict[tuple[str, Who], Verdict] = {}
        # Phases that a rank was ever named for: their series go on, at 0.
        self.named: set[tuple[Who, str]] = set()
        self.ended: dict[Who, Gone] = {}
        # Whose end is to be thought of once more: process id and start, and when.
        self.afterthoughts: list[tuple[Gone, tuple[int, int], int]] = []
        # What is said of processes whose journals may be gone: themselves, and their last values.
        self.last: dict[Who, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
        self.node: Labels = ()
        self.postmortem: dict[tuple[str, Who], Path | None] = {}
        self.gpus: dict[tuple[str, Who], Sequence[Gpu]] = {}
        self.moved: tuple[Kind, Path | None] | None = None
        # Ranks whose waits are known or not, as they were told.
        self.waits: dict[Who, bool] = {}
        # How the ranks compare, as last worked out, and whether there were steps since.
        self.report: Report | None = None
        self.report_is_old = True
        # How far the collectives are, of those who were asked and have not moved since.
        self.heard: dict[Who, tuple[Group, ...]] = {}
        # Series that are true now; those that were and are no longer are taken away.
        self.shown: set[tuple[catalog.Metric, Labels]] = set()
        self.showing: set[tuple[catalog.Metric, Labels]] = set()

    def leave(self, who: Who) -> None:
        """This process is gone, or has another name by now."""
        self.report_is_old = True
        # Whoever comes under this name after it may be of another kind, or has to say it again.
        self.waits.pop(who, None)
        for detector in (self.stragglers, self.arrivals, self.bounds, self.creep):
            _forget(detector.forget, who)


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
        self._gpus = gpus
        self._clock = clock
        self._floor_s = floor_s
        self._postmortems = postmortems
        self._rooms: dict[str, _Room] = {}
        self._seats: dict[Intake, _Seat] = {}
        self._causes = Causes()
        self._told: dict[tuple[str, ...], str] = {}
        self._look_at = self._watch_at = 0
        self._documents: list[tuple[Labels, str, list[Document]]] = []
        # The clock of all that is said here: set once, and going on without jumps.
        self._origin_ns = time.time_ns() - clock()

    @containment.contained()
    def take(self, intakes: Iterable[Intake]) -> None:
        """What the processes have told since the last time, and where they stand now."""
        now_ns = self._origin_ns + self._clock()
        # Of two with one name the newer one is the one that stands there.
        known = sorted(
            (each for each in intakes if each.labels), key=lambda each: each.reader.created_ns
        )
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
            for run in list(self._rooms):
                self._look(run, [each for each in known if _run(each.labels) == run], now_ns)

    @containment.contained()
    def _watch(self, intake: Intake, now_ns: int) -> None:
        seat = self._seats[intake]
        pid = intake.pid, intake.reader.start_ticks
        self._causes.watch(*pid)
        room = self._rooms[_run(seat.who)]
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
            if seat is not None and (left := self._rooms.get(_run(seat.who))) is not None:
                left.leave(seat.who)
            seat = self._seats[intake] = _Seat(intake)
            self._causes.watch(intake.pid, intake.reader.start_ticks)
        room = self._rooms.get(_run(seat.who))
        if room is None:
            room = self._rooms[_run(seat.who)] = _Room(self._floor_s)
        room.node = tuple(pair for pair in seat.who if pair[0] in catalog.NODE_LABELS)
        world = intake.who.get("world_size")
        if isinstance(world, int):
            room.stragglers.world_size(world)
            room.arrivals.world_size(world)
        self._hear_of_waits(room, seat.who, intake)
        if steps := intake.fresh_steps():
            room.report_is_old = True
            _listen(room.arrivals, seat.who, intake, steps)
            runs = alike(steps)
            _learn(room.stalls, seat.who, runs)
            facts = [each for run in runs for each in facts_of(run)]
            _feed(room.stragglers, seat.who, facts)
            _feed(room.bounds, seat.who, facts)
        ended = intake.ended_at is not None and not seat.told_gone
        if ended:
            # The last thing that it said may be why.
            now_ns = self._origin_ns + self._clock()
            room.nonfinite.feed(seat.who, seat.values.odd(now_ns, ended=True))
        return ended

    def _hear_of_waits(self, room: _Room, who: Who, intake: Intake) -> None:
        said = intake.reader.facts.get("capability")
        if not isinstance(said, dict) or "comm_wait" not in said:
            return
        known = not said["comm_wait"]
        if room.waits.get(who) != known:
            room.waits[who] = known
            room.report_is_old = True
            room.stragglers.waits_known(who, known)
            room.arrivals.waits_known(who, known)
            room.bounds.waits_known(who, known)

    # -- looking

    def _look(self, run: str, intakes: list[Intake], now_ns: int) -> None:
        room = self._rooms[run]
        room.moved = None
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
            self._tell(room, run, change, intakes, now_ns)

    def _stalls(self, room: _Room, intakes: list[Intake], now_ns: int) -> list[Change]:
        positions = []
        evidence: dict[Who, Evidence] = {}
        for intake in intakes:
            seat = self._seats[intake]
            position = self._position(intake, seat)
            if position is not None:
                positions.append(position)
            # It costs a file a thread: only where there is a suspicion.
            if seat.who in room.stalls.suspects and intake.ended_at is None:
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
        world = intake.who.get("world_size")
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
            world=world if isinstance(world, int) else None,
        )

    # -- deaths

    def _deaths(self, room: _Room, intakes: list[Intake], now_ns: int) -> list[Change]:
        changes: list[Change] = []
        found = []
        at_work = {self._seats[each].who for each in intakes if each.ended_at is None}
        for intake in intakes:
            seat = self._seats[intake]
            if intake.ended_at is None:
                if seat.who in room.ended:
                    del room.ended[seat.who]
                    # The run was started anew: what ended it before is not thought of again.
                    self._think_no_more(room)
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
            gone = room.ended[seat.who] = self._gone(intake, seat)
            found.append(gone)
            room.last[seat.who] = _said(intake)
            pid = intake.pid, intake.reader.start_ticks
            room.afterthoughts += [(gone, pid, now_ns + after) for after in _AFTERTHOUGHTS_NS]
        for thought in [each for each in room.afterthoughts if now_ns >= each[2]]:
            room.afterthoughts.remove(thought)
            gone, pid, _ = thought
            found.append(gone._replace(cause=self._causes.why(*pid)))
            if not any(each[1] == pid for each in room.afterthoughts):
                self._causes.forget(*pid)
        return changes + (room.deaths.gone(found) if found else [])

    def _think_no_more(self, room: _Room) -> None:
        for _, pid, _ in room.afterthoughts:
            self._causes.forget(*pid)
        room.afterthoughts.clear()

    def _gone(self, intake: Intake, seat: _Seat) -> Gone:
        progress = intake.reader.progress()
        described = intake.describe()
        told_ns = 0 if progress is None else progress.state_since_ns
        spoke = intake.state != _KILLED and told_ns
        return Gone(
            who=seat.who,
            state=_STATES.get(intake.state, "killed"),
            step=intake.step(),
            phase=described["phase"],
            phase_since_ns=described["phase_since_ns"],
            seen_alive_ns=told_ns if spoke else intake.seen_alive_ns,
            gone_ns=told_ns if spoke else intake.gone_ns,
            reason=described["reason"],
            cause=self._causes.why(intake.pid, intake.reader.start_ticks),
        )

    # -- telling

    @containment.contained()
    def _tell(
        self, room: _Room, run: str, change: Change, intakes: list[Intake], now_ns: int
    ) -> None:
        if change.opened and change.verdict.kind == "straggler":
            change = change._replace(verdict=with_gpu(change.verdict, self._gpus()))
        verdict = change.verdict
        before = room.verdicts.pop(verdict.key, None)
        if change.opened:
            room.verdicts[verdict.key] = verdict
        else:
            # What is told of another rank in the same breath is the same incident.
            room.moved = verdict.kind, room.postmortem.pop(verdict.key, None)
            room.gpus.pop(verdict.key, None)
        if verdict.kind == "straggler":
            room.named.add((verdict.who, verdict.phase))
        # One record an incident, and one more where it turns out to be another one.
        if not change.opened or before is None or _gist(before) != _gist(verdict):
            said = "%s" if change.opened else "no longer: %s"
            if change.opened:
                # Of a death the last word counts, whomever it is about.
                about = "" if verdict.kind == "death" else str(verdict.who)
                self._told[run, verdict.kind, about] = verdict.sentence
            log.log(logging.WARNING if _warns(change) else logging.INFO, said, verdict.sentence)
            self._record(change, intakes, now_ns)
        if change.opened and verdict.kind in ("death", "stall"):
            self._write_down(room, run, verdict, intakes)

    def _record(self, change: Change, intakes: list[Intake], now_ns: int) -> None:
        """A log record, and a span from when it began until now with the same as its event."""
        if not self._ledger.keep_history:
            return
        verdict, opened = change
        project = next((each.project for each in intakes if each.project), "")
        attributes = {
            "verdict": verdict.kind,
            "verdict.state": "opened" if opened else "closed",
            "phase": verdict.phase,
            "sentence": verdict.sentence,
            **dict(_flat(verdict.evidence)),
        }
        name = f"training.{verdict.kind}"
        trace = f"step/{verdict.step}" if verdict.step is not None else f"name/{name}"
        since_ns = min(verdict.since_ns or now_ns, now_ns)
        told = f"{verdict.key}/{opened}/{now_ns}".encode("utf-8", "replace")
        span_id = blake2s(told, digest_size=8).hexdigest()
        common = {"name": name, "trace": trace, "step": verdict.step, "attributes": attributes}
        event = {"name": name, "time": now_ns, "attributes": attributes}
        span = {
            **common,
            "id": span_id,
            "parent": "",
            "start": since_ns,
            "end": now_ns,
            "error": verdict.sentence if _warns(change) else "",
            "events": [event],
        }
        record = {
            **common,
            "time": now_ns,
            "span": span_id,
            "body": verdict.sentence if opened else f"no longer: {verdict.sentence}",
            "severity": "WARN" if _warns(change) else "INFO",
        }
        documents = [Document(SPAN, span, 0), Document(EVENT, record, 0)]
        self._documents.append((verdict.who, project, documents))

    def handles(self) -> list[int]:
        """Descriptors that become readable when a process dies."""
        return self._causes.handles()

    def documents(self) -> list[tuple[Labels, str, list[Document]]]:
        """What is to be exported, once."""
        documents, self._documents = self._documents, []
        return documents

    def _write_down(self, room: _Room, run: str, verdict: Verdict, intakes: list[Intake]) -> None:
        earlier = room.postmortem.get(verdict.key)
        if earlier is None and room.moved is not None and room.moved[0] == verdict.kind:
            earlier = room.moved[1]
        # As they were when it began: who is dead has left its device since.
        gpus = room.gpus.setdefault(verdict.key, self._gpus())
        said = {**room.last, **{each.labels: _said(each) for each in intakes}}
        room.postmortem[verdict.key] = postmortem.write(
            self._postmortems,
            run,
            verdict=_plain(verdict),
            processes=[described for described, _ in said.values()],
            values=[value for _, values in said.values() for value in values],
            open_verdicts=[_plain(e) for e in room.verdicts.values() if e.key != verdict.key],
            gpus=gpus,
            now_ns=time.time_ns(),
            earlier=earlier,
        )

    # -- standing

    def stand(self, now_ns: int) -> None:
        """Bring the series up to date. The caller holds the ledger's lock."""
        for room in self._rooms.values():
            room.showing = set()
            self._stand_speed(room, now_ns)
            self._stand_stalls(room, now_ns)
            for metric, labels in room.shown - room.showing:
                self._ledger.forget(self._ledger.series(metric, labels))
            room.shown = room.showing

    @containment.contained()
    def _stand_speed(self, room: _Room, now_ns: int) -> None:
        if room.report is None or room.report_is_old:
            room.report_is_old = False
            told_by = room.arrivals if room.arrivals.wanted else room.stragglers
            room.report = told_by.report()
        report = room.report
        for rank in report.ranks:
            self._put(catalog.TRAINING_STRAGGLER_LOST_TIME, rank.who, rank.lost_s, now_ns)
            late = rank.phase if rank.kind == "straggler" else None
            for phase in {phase for who, phase in room.named if who == rank.who}:
                where = ("phase", phase)
                value = float(phase == late)
                self._put(catalog.TRAINING_STRAGGLER, rank.who, value, now_ns, where)
            if report.insufficient:
                continue
            # Without a phase: that there is nothing to say of a rank is something that was seen.
            self._show(room, catalog.TRAINING_STRAGGLER, rank.who, 0.0, now_ns, ("phase", ""))
            for phase, share in rank.excess.items():
                where = ("phase", phase)
                self._show(room, catalog.TRAINING_STRAGGLER_EXCESS, rank.who, share, now_ns, where)
        if report.work_max_s is not None and report.work_median_s is not None:
            self._show(room, catalog.TRAINING_NODE_WORK_MAX, room.node, report.work_max_s, now_ns)
            self._show(
                room, catalog.TRAINING_NODE_WORK_MEDIAN, room.node, report.work_median_s, now_ns
            )

    @containment.contained()
    def _stand_stalls(self, room: _Room, now_ns: int) -> None:
        for who, limit_s in room.stalls.limits.items():
            self._show(room, catalog.TRAINING_STALL_TIMEOUT, who, limit_s, now_ns)
            stalled = float(room.stalls.stalled.get(who, False))
            self._show(room, catalog.TRAINING_STALLED, who, stalled, now_ns)
        for who, groups in room.heard.items():
            for group in groups:
                for metric, number in (
                    (catalog.TRAINING_COLLECTIVE_ENQUEUED, group.enqueued),
                    (catalog.TRAINING_COLLECTIVE_COMPLETED, group.completed),
                ):
                    if number is not None:
                        where = ("process_group", group.name)
                        self._show(room, metric, who, float(number), now_ns, where)

    def _show(
        self,
        room: _Room,
        metric: catalog.Metric,
        labels: Labels,
        value: float,
        now_ns: int,
        *more: tuple[str, str],
    ) -> None:
        """Put what is true at this moment, and is absent when it is not known any more."""
        room.showing.add((metric, (*labels, *more)))
        self._put(metric, labels, value, now_ns, *more)

    def _put(
        self,
        metric: catalog.Metric,
        labels: Labels,
        value: float,
        now_ns: int,
        *more: tuple[str, str],
    ) -> None:
        self._ledger.put(metric, (*labels, *more), value, now_ns, self._origin_ns)

    def retire(self, runs: set[str]) -> None:
        """Forget the runs of which nothing is left to show."""
        for run in [each for each in self._rooms if each not in runs]:
            room = self._rooms.pop(run)
            self._think_no_more(room)
            self._told = {key: said for key, said in self._told.items() if key[0] != run}
            with self._ledger.lock:
                self._ledger.drop(room.node)

    def verdicts(self) -> list[dict[str, Any]]:
        """What is open, for the status."""
        # Asked for by the endpoint's threads too, while the loop goes on: each list is a copy.
        rooms = list(self._rooms.values())
        return [_plain(each) for room in rooms for each in list(room.verdicts.values())][-_KEPT:]

    def told(self) -> list[str]:
        """What was ever found, also where it is over."""
        return list(self._told.values())[-_KEPT:]

    def insufficient(self) -> dict[str, str]:
        """Runs of which nothing can be said, and why."""
        return {
            run: room.report.insufficient
            for run, room in list(self._rooms.items())
            if room.report is not None and room.report.insufficient
        }


# One detector that breaks takes nothing from the others, and nothing from the other runs.


@containment.contained()
def _learn(stalls: Stalls, who: Who, runs: Sequence[Run]) -> None:
    longest_ns: dict[str, int] = {}
    for run in runs:
        for code, span_ns in run.longest_ns().items():
            phase = _PHASES.get(code, "other")
            longest_ns[phase] = max(span_ns, longest_ns.get(phase, 0))
    steps = [step for run in runs for step in run.steps]
    steps_s = [(step.ended_ns - step.began_ns) / 1e9 for step in steps]
    stalls.learn(who, steps[0].began_ns, steps_s, longest_ns)


@containment.contained()
def _feed(detector: Stragglers | Bounds, who: Who, facts: Sequence[StepFacts]) -> None:
    detector.feed(who, facts)


@containment.contained()
def _listen(arrivals: Arrivals, who: Who, intake: Intake, steps: Sequence[Step]) -> None:
    arrivals.take(who, intake, steps)


@containment.contained(default=())
def _found(look: Callable[[], Iterable[Change]]) -> Iterable[Change]:
    return look()


@containment.contained()
def _forget(forget: Callable[[Who], None], who: Who) -> None:
    forget(who)


def _warns(change: Change) -> bool:
    return change.opened and change.verdict.kind not in _CALM


def _gist(verdict: Verdict) -> tuple[str, Any]:
    return verdict.phase, verdict.evidence.get("cause")


def _run(labels: Labels) -> str:
    return dict(labels).get("run", "")


def _said(intake: Intake) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    described = intake.describe()
    values = postmortem.last_values(intake.reader, described["rank"], described["node"])
    return described, values


def _plain(verdict: Verdict) -> dict[str, Any]:
    return {**verdict._asdict(), "who": dict(verdict.who), "evidence": dict(verdict.evidence)}


def _flat(evidence: Mapping[str, Any], prefix: str = "evidence") -> Iterator[tuple[str, Any]]:
    """As attributes: numbers and words; what is a list of things stays in the post-mortem."""
    for name, value in evidence.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}.{name}")
        elif isinstance(value, (str, bool, int, float)):
            yield f"{prefix}.{name}", value
