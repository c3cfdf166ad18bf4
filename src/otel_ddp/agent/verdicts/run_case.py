"""One run on this node: its detectors, what they are fed, and what they have found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_ddp import catalog
from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.reading.steps import Step
from otel_ddp.agent.verdicts.arrivals_question import Arrivals
from otel_ddp.agent.verdicts.exit_causes import ExitCauses
from otel_ddp.agent.verdicts.exits import Exits
from otel_ddp.agent.verdicts.process_case import ProcessCase, Snapshot, snapshot
from otel_ddp.diagnosis.bounds import Bounds
from otel_ddp.diagnosis.core_evidence import Cores, core_hint
from otel_ddp.diagnosis.death.detector import Deaths
from otel_ddp.diagnosis.device_steps import DeviceSteps
from otel_ddp.diagnosis.gpu_evidence import Gpu
from otel_ddp.diagnosis.memory_creep import MemoryCreep
from otel_ddp.diagnosis.nonfinite import Nonfinite
from otel_ddp.diagnosis.stall.detector import Stalls
from otel_ddp.diagnosis.stall.evidence import Evidence, Group, Position
from otel_ddp.diagnosis.step_facts import StepBatch, StepFacts, batches_of, facts_of
from otel_ddp.diagnosis.straggler.detector import Stragglers
from otel_ddp.diagnosis.straggler.report import Report
from otel_ddp.diagnosis.verdict import Change, Kind, Labels, Verdict
from otel_ddp.errors import containment
from otel_ddp.journal.process_state import World, training_world
from otel_ddp.words import PHASES, phase_word

# So many verdicts that are over are kept of a run.
_MOST_PAST = 20


class RunCase:
    """Fed and polled by the judge; read by the reporter and by what writes series."""

    def __init__(
        self,
        run: Labels,
        floor_s: float,
        causes: ExitCauses,
        origin_ns: int,
        cores: Callable[[], Cores] = dict,
    ) -> None:
        """*floor_s*: the shortest stall limit; *origin_ns*: when the monotonic clock was 0.

        *cores*: for how long the ranks have waited for a core lately.
        """
        self.run = run
        self._cores = cores
        self._causes = causes
        self._origin_ns = origin_ns
        # How many ranks train together. Evaluators and actors report another world.
        self.world_size = 0
        self._worlds: dict[Labels, World] = {}
        # Whether any process of this run has been seen to train.
        self._trained = False
        self.stragglers = Stragglers(hint=self._hint)
        self.arrivals = Arrivals(hint=self._hint)
        self.bounds = Bounds()
        self.stalls = Stalls(floor_s)
        self.deaths = Deaths()
        self.creep = MemoryCreep()
        self.nonfinite = Nonfinite()
        self.exits = Exits(causes)
        self.verdicts: dict[tuple[str, Labels], Verdict] = {}
        # The same verdicts as the detectors have made them, without what the reporter adds.
        self.as_found: dict[tuple[str, Labels], Verdict] = {}
        # The last verdicts that are over, as JSON.
        self.past: deque[dict[str, Any]] = deque(maxlen=_MOST_PAST)
        # Those that a history alone tells: what has bounded the run.
        self.past_bounds: deque[dict[str, Any]] = deque(maxlen=_MOST_PAST)
        # Phases that a rank was ever named for, and the side: their series go on, at 0.
        self.named: set[tuple[Kind, Labels, str, str]] = set()
        # What post-mortems show of ended processes, whose journals may have been deleted.
        self.last_snapshots: dict[Labels, Snapshot] = {}
        # Where ended processes were, and when they ended: others may wait for them.
        self._ended: dict[Labels, tuple[Position, int]] = {}
        # The processes whose end this poll has found.
        self.just_ended: list[Labels] = []
        self.node: Labels = ()
        self.postmortem: dict[tuple[str, Labels], Path | None] = {}
        self.gpus: dict[tuple[str, Labels], Sequence[Gpu]] = {}
        # The kind and the post-mortem of the verdict that this poll has closed.
        self.just_closed: tuple[Kind, Path | None] | None = None
        # What each process says of its waits and of the user's collectives, once it does.
        self._waits_known: dict[Labels, bool] = {}
        self.own_collectives: dict[Labels, tuple[str, ...]] = {}
        # The ranks that a device works for; None where its clock is not known.
        self._device_steps: dict[Labels, DeviceSteps | None] = {}
        # How the ranks compare, as last worked out, and whether there were steps since.
        self.report: Report | None = None
        self.report_is_old = True
        # How far the suspected ranks are in their collectives.
        self.collectives: dict[Labels, tuple[Group, ...]] = {}
        # Series that are true now. Those that no longer are get removed.
        self.shown: set[tuple[catalog.Metric, Labels]] = set()
        self.showing: set[tuple[catalog.Metric, Labels]] = set()

    # -- what the processes report

    def update_world(self, labels: Labels, journal: JournalFeed, trains: bool) -> None:
        """How many ranks this living process trains with; *trains*: it makes steps, or will."""
        size, known = journal.world_size, self._worlds.get(labels)
        if size is None:
            return
        world = World(size, trains or (known is not None and known.trains))
        if world != known:
            self._trained |= world.trains
            self._regroup({**self._worlds, labels: world})

    def _regroup(self, worlds: dict[Labels, World]) -> None:
        before = [labels for labels, each in self._worlds.items() if each.size == self.world_size]
        self._worlds = worlds
        self.world_size = training_world(worlds.values(), World(self.world_size, self._trained))
        for detector in (self.stragglers, self.arrivals, self.bounds):
            detector.set_world_size(self.world_size)
        for labels in before:
            if labels in worlds and self.is_beside(worlds[labels].size):
                self._forget_speed(labels)

    def is_beside(self, world_size: int | None) -> bool:
        """Whether a process with such a world is beside those that train together.

        No rank waits for it. So it is not compared, and it neither stalls the run nor keeps it
        going.
        """
        return world_size is not None and world_size != self.world_size

    def update_waits_known(self, labels: Labels, journal: JournalFeed) -> None:
        """Whether this process can tell its waits from its work."""
        capability = journal.reader.facts.get("capability")
        if not isinstance(capability, dict) or "comm_wait" not in capability:
            return
        known = not capability["comm_wait"]
        if self._waits_known.get(labels) != known:
            self._waits_known[labels] = known
            self.report_is_old = True
            self.stragglers.set_waits_known(labels, known)
            self.arrivals.set_waits_known(labels, known)
            self.bounds.set_waits_known(labels, known)

    def _hint(
        self, labels: Labels, phase: str, evidence: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        """What a late rank's cores add to its verdict."""
        return core_hint(labels, phase, evidence, self._cores(), labels in self._device_steps)

    def update_own_collectives(self, labels: Labels, journal: JournalFeed) -> None:
        """The phases in which the user's own code calls collectives."""
        found = journal.reader.facts.get("own_collectives")
        if not isinstance(found, list):
            return
        phases = tuple(e for e in found if isinstance(e, str) and e in PHASES)
        if self.own_collectives.get(labels) != phases:
            self.own_collectives[labels] = phases
            self.report_is_old = True
            self.stragglers.set_own_collectives(labels, phases)
            self.bounds.set_own_collectives(labels, phases)

    def update_clock(self, labels: Labels, journal: JournalFeed) -> None:
        """By which clock the steps of this process are compared: its device's if it has one."""
        capability = journal.reader.facts.get("capability")
        if not isinstance(capability, dict) or "device_clock" not in capability:
            return
        known = not capability["device_clock"]
        if labels in self._device_steps and known == (self._device_steps[labels] is not None):
            return
        self._device_steps[labels] = DeviceSteps() if known else None
        self.report_is_old = True
        self.stragglers.set_clock_known(labels, known)

    def feed_steps(
        self, labels: Labels, journal: JournalFeed, steps: Sequence[Step], now_ns: int
    ) -> None:
        """New steps of a rank on its host's clock, for the detectors of speed and of stalls."""
        self.drop_ended_before(steps[-1].began_ns)
        _feed_arrivals(self.arrivals, labels, journal, steps)
        batches = batches_of(steps)
        learn(self.stalls, now_ns, labels, batches)
        facts = [each for batch in batches for each in facts_of(batch)]
        if labels not in self._device_steps:
            self._compare(labels, facts)
        elif on_device := self._device_steps[labels]:
            on_device.feed_host(facts)

    def feed_device_steps(self, labels: Labels, steps: Sequence[Step]) -> None:
        """New steps of a rank on its device's clock."""
        if on_device := self._device_steps.get(labels):
            facts = on_device.feed(steps)
            _feed_arrivals_on_device(self.arrivals, labels, facts)
            self._compare(labels, facts)

    def _compare(self, labels: Labels, facts: Sequence[StepFacts]) -> None:
        self.report_is_old = True
        if facts:
            _feed(self.stragglers, labels, facts)
            _feed(self.bounds, labels, facts)

    def drop_ended_before(self, since_ns: int) -> None:
        """A process or a step began at this time, without the processes that had ended by then."""
        self._ended = {labels: each for labels, each in self._ended.items() if each[1] >= since_ns}

    def remove(self, labels: Labels) -> None:
        """This process has ended, or has other labels now."""
        self._forget_speed(labels)
        _forget(self.creep.forget, labels)
        self._regroup({other: each for other, each in self._worlds.items() if other != labels})

    def _forget_speed(self, labels: Labels) -> None:
        self.report_is_old = True
        # The next process with these labels may be of another kind, and reports these again.
        self._waits_known.pop(labels, None)
        self.own_collectives.pop(labels, None)
        self._device_steps.pop(labels, None)
        for detector in (self.stragglers, self.arrivals, self.bounds):
            _forget(detector.forget, labels)

    # -- what the detectors find

    def poll(self, processes: Sequence[ProcessCase], now_ns: int) -> list[Change]:
        """What has changed, given the processes of the run."""
        self.just_closed, self.just_ended = None, []
        polls: tuple[Callable[[], list[Change]], ...] = (
            lambda: self._poll_deaths(processes, now_ns),
            lambda: self._poll_stalls(processes, now_ns),
            self.stragglers.poll,
            lambda: self.arrivals.poll(now_ns, not self.stalls.suspects),
            self.bounds.poll,
            self.creep.poll,
            lambda: self.nonfinite.poll(now_ns),
        )
        return [change for poll in polls for change in _contained(poll)]

    def present(self) -> list[Verdict]:
        """The open verdicts whose figures move, as they are now."""
        return [
            *self.stalls.present(),
            *self.stragglers.present(),
            *self.arrivals.present(),
            *self.bounds.present(),
            *self.creep.present(),
        ]

    def _poll_stalls(self, processes: Sequence[ProcessCase], now_ns: int) -> list[Change]:
        # Ended processes come first: a living one may have the labels of one of them, and replaces
        # it. Those of a larger world may have finished, and this process goes on without them.
        positions = [
            position
            for position, _ in self._ended.values()
            if position.world is None or position.world >= self.world_size
        ]
        evidence: dict[Labels, Evidence] = {}
        for each in processes:
            if not each.is_at_work or self.is_beside(each.journal.world_size):
                continue
            position = each.position(self._origin_ns)
            if position is not None:
                positions.append(position)
            # This reads a file for each thread: only where there is a suspicion.
            if each.labels in self.stalls.suspects:
                evidence[each.labels] = each.question.poll(now_ns)
        self.collectives = {
            labels: known.groups for labels, known in evidence.items() if known.groups
        }
        changes = self.stalls.poll(now_ns, positions, evidence)
        for each in processes:
            if (question := self.stalls.questions.get(each.labels)) and each.is_at_work:
                each.question.ask(question, now_ns)
        return changes

    def _poll_deaths(self, processes: Sequence[ProcessCase], now_ns: int) -> list[Change]:
        changes: list[Change] = []
        found = []
        at_work = {each.labels for each in processes if each.is_at_work}
        for each in processes:
            if each.is_at_work:
                if self.exits.has_restarted(each.labels):
                    changes += self.deaths.feed_restarted(each.labels)
                continue
            if each.end_is_known:
                continue
            each.end_is_known = True
            if each.labels in at_work:
                # A new process had these labels before the agent saw the end of this one.
                self._causes.forget(*each.process)
                continue
            self.remove(each.labels)
            self.just_ended.append(each.labels)
            ended = self.exits.feed(each.journal, each.labels, now_ns)
            found.append(ended)
            self.last_snapshots[each.labels] = snapshot(each.journal)
            if (position := each.position(self._origin_ns)) is not None:
                self._ended[each.labels] = position, ended.ended_ns
        self.exits.poll()
        found += self.exits.updated(now_ns)
        if not found:
            return changes
        beside = {each.labels for each in processes if self.is_beside(each.journal.world_size)}
        under_nccl = any("nccl" in str(e.journal.reader.facts.get("backend")) for e in processes)
        return changes + self.deaths.feed(found, at_work - beside, self.stalls.told, under_nccl)


# A detector that breaks takes nothing from the others, nor from other runs.


@containment.contained()
def learn(stalls: Stalls, now_ns: int, labels: Labels, batches: Sequence[StepBatch]) -> None:
    """Let the stall detector learn how long the steps and phases of a rank take."""
    longest_ns: dict[str, int] = {}
    for batch in batches:
        for code, span_ns in batch.longest_ns().items():
            phase = phase_word(code)
            longest_ns[phase] = max(span_ns, longest_ns.get(phase, 0))
    steps = [step for batch in batches for step in batch.steps]
    steps_s = [(step.ended_ns - step.began_ns) / 1e9 for step in steps]
    stalls.learn(now_ns, labels, steps[0].began_ns, steps_s, longest_ns)


@containment.contained()
def _feed(detector: Stragglers | Bounds, labels: Labels, facts: Sequence[StepFacts]) -> None:
    detector.feed(labels, facts)


@containment.contained()
def _feed_arrivals(
    arrivals: Arrivals, labels: Labels, journal: JournalFeed, steps: Sequence[Step]
) -> None:
    arrivals.feed(labels, journal, steps)


@containment.contained()
def _feed_arrivals_on_device(
    arrivals: Arrivals, labels: Labels, facts: Sequence[StepFacts]
) -> None:
    arrivals.feed_device(labels, facts)


@containment.contained()
def _forget(forget: Callable[[Labels], None], labels: Labels) -> None:
    forget(labels)


@containment.contained(default=())
def _contained(poll: Callable[[], Iterable[Change]]) -> Iterable[Change]:
    return poll()
