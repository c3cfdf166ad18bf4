"""One run: its detectors, what they are fed, and what they find."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from otel_ddp import errors
from otel_ddp.agent.reading.process import Process
from otel_ddp.agent.verdicts.answers import Ras, remark
from otel_ddp.agent.verdicts.reports import Judgement, RunReports
from otel_ddp.diagnosis.death.cause import EndedProcess
from otel_ddp.diagnosis.death.incident import Deaths
from otel_ddp.diagnosis.detector import Detector, Observation, RankState
from otel_ddp.diagnosis.nonfinite import Nonfinite
from otel_ddp.diagnosis.stall.detector import Stalls
from otel_ddp.diagnosis.stall.evidence import Evidence
from otel_ddp.diagnosis.stall.silence import Silence
from otel_ddp.diagnosis.step_facts import DeviceSteps, facts_of
from otel_ddp.diagnosis.straggler.detector import Stragglers
from otel_ddp.diagnosis.straggler.finding import Report
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict
from otel_ddp.journal.process_state import World, training_world
from otel_ddp.vocabulary.words import ENDED_STATES, state_word


class _Process:
    """What is kept of one process."""

    def __init__(self) -> None:
        self.end_is_known = False
        self.rank: RankState | None = None
        self._device: DeviceSteps | None = None

    def observe(self, source: Process, rank: RankState) -> Observation:
        """Its new steps, on the clock that its waits are on: its device's if it has one."""
        facts = facts_of(source.new.steps)
        if rank.device_clock:
            self._device = self._device or DeviceSteps()
            self._device.feed_host(facts)
            facts = self._device.feed(source.new.device_steps)
        elif rank.device_clock is not None:
            self._device, facts = None, []
        seen = Observation(steps=source.new.steps, facts=facts)
        source.pace.feed(seen)
        return seen


class _Processes:
    """All processes of a run that the judge is given, and what is kept of each."""

    def __init__(self) -> None:
        self.known: dict[Process, _Process] = {}
        self.newest: dict[Labels, Process] = {}
        self._left_out: set[Process] = set()
        self.nodes_here: set[str] = set()

    def keep(self, sources: Collection[Process]) -> set[Labels]:
        """These are all now, by their beginning; the labels of those that are gone."""
        before, self.known = (
            self.known,
            {each: self.known.get(each) or _Process() for each in sources},
        )
        self.newest = {each.labels: each for each in sources}
        self.nodes_here |= {_node(each.labels) for each in sources if each.is_here}
        gone = {each.labels for each, known in before.items() if not known.end_is_known}
        return gone - self.newest.keys()

    def newly_left_out(self) -> list[Labels]:
        """The living ones whose own agents judge them by now. What was kept of them is gone."""
        before = self._left_out
        self._left_out = {each for each in self.known if each.is_left_out and each.is_at_work}
        new = self._left_out - before
        self.known.update((each, _Process()) for each in new)
        return [each.labels for each in new]

    def forget(self) -> None:
        """What was kept of each."""
        self.known = {each: _Process() for each in self.known}

    def living(self, labels: Labels) -> Process | None:
        """The newest living process with these labels."""
        newest = self.newest.get(labels)
        if newest is None or newest.is_at_work:
            return newest
        living = [each for each in self.known if each.labels == labels and each.is_at_work]
        return max(living, key=lambda each: each.began_ns, default=None)


def _node(labels: Labels) -> str:
    return dict(labels).get("node", "")


class _Worlds:
    """How many ranks train together. Evaluators and actors report another world."""

    def __init__(self) -> None:
        self._known = World(0, trains=False)
        self._of: dict[Labels, World] = {}
        # How many processes have each: mostly all have the same.
        self._counts: Counter[World] = Counter()

    @property
    def size(self) -> int:
        return self._known.size

    def update(self, labels: Labels, size: int | None, trains: bool = False) -> None:
        """*size*: of a living process; None: it is gone. *trains*: it makes steps, or will."""
        before = self._of.pop(labels, None)
        if before is not None:
            self._counts[before] -= 1
        if size is not None:
            world = World(size, trains or (before is not None and before.trains))
            self._of[labels] = world
            self._counts[world] += 1
            if world == before:
                return
        living = [each for each, count in self._counts.items() if count]
        # Whether any process of this run has been seen to train.
        trained = self._known.trains or any(each.trains for each in living)
        last = World(self._known.size, trained)
        self._known = World(training_world(living, last), trained)


# When an end is looked at again. Other ranks report theirs soon after. The kernel knows the cause
# once the process has left, which takes Python seconds, and once its launcher has looked, which may
# take 5 s more.
_LOOK_AGAIN_AFTER_NS = (500_000_000, 2_000_000_000, 6_000_000_000, 20_000_000_000)


class _Exit:
    """The end of a process, and when it is looked at again."""

    def __init__(self, ended: EndedProcess, now_ns: int) -> None:
        self.ended = ended
        self.found_ns = now_ns
        self.looks_ns = [now_ns + after for after in _LOOK_AGAIN_AFTER_NS]


class Exits:
    """The processes of one run that have ended."""

    def __init__(self) -> None:
        self.new: list[Labels] = []
        """Those whose end the last poll has found."""
        self._ended: set[Labels] = set()
        self._exits: dict[Process, _Exit] = {}

    def add(self, source: Process, now_ns: int) -> EndedProcess:
        """How this process ended, as far as that is known at once."""
        ended = source.end()
        self.new.append(ended.labels)
        self._ended.add(ended.labels)
        self._exits[source] = _Exit(ended, now_ns)
        return ended

    def note_at_work(self, labels: Labels) -> None:
        """A process with these labels is at work. If an earlier one had ended, the run restarts."""
        if labels in self._ended:
            self._ended.remove(labels)
            self.forget_all()

    def poll(self, now_ns: int) -> list[EndedProcess]:
        """The ends, where more may be known of one by now."""
        looked = False
        for source, each in self._exits.items():
            # One that reported its end may still exist.
            if each.ended.state != "killed" and (present_ns := source.host.present_ns()):
                each.ended = each.ended._replace(last_present_ns=present_ns)
            if now_ns >= each.looks_ns[0]:
                looked, known_for_s = True, (now_ns - each.found_ns) / 1e9
                each.ended = each.ended._replace(cause=source.host.cause(), known_for_s=known_for_s)
                each.looks_ns = [at for at in each.looks_ns if at > now_ns]
        found = [each.ended for each in self._exits.values()] if looked else []
        for source in [source for source, each in self._exits.items() if not each.looks_ns]:
            source.host.forget()
            del self._exits[source]
        # A verdict on one end depends on when the other processes left, too.
        return found

    def forget_all(self) -> None:
        """No end is looked at again."""
        for source in self._exits:
            source.host.forget()
        self._exits.clear()


class RunCase:
    """Fed and polled by the judge; read by what writes series."""

    def __init__(
        self,
        run: Labels,
        floor_s: float,
        origin_ns: int,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        """*floor_s*: the shortest stall limit; *origin_ns*: when the monotonic clock was 0."""
        self.run = run
        self._floor_s = floor_s
        self._origin_ns = origin_ns
        self._processes = _Processes()
        self._ras = Ras(env)
        self.reports = RunReports(run)
        self.judgement: Judgement | None = None
        """What the agent says that leads the run; None: this one judges it."""
        self._begin()

    def _begin(self) -> None:
        """Judge with detectors that know nothing yet."""
        self._world = _Worlds()
        self._exits = Exits()
        self._deaths = Deaths()
        self._silence = Silence()
        self.stalls = Stalls(self._floor_s)
        self.stragglers = Stragglers()
        self._others: Sequence[Detector] = (self.stragglers.bounds, Nonfinite())
        self._detectors: Sequence[Detector] = (
            self._deaths,
            self._silence,
            self.stalls,
            self.stragglers,
            *self._others,
        )
        self.last_report: Report | None = None
        """How the ranks compare, as last worked out here or by the agent that leads."""
        self._has_news = True

    @property
    def own_collectives(self) -> Mapping[Labels, tuple[str, ...]]:
        """The phases in which the program of a rank calls collectives itself."""
        ranks = [each.rank for each in self._processes.known.values() if not each.end_is_known]
        return {
            rank.labels: rank.own_collectives
            for rank in ranks
            if rank is not None and not rank.is_beside
        }

    @property
    def training_here(self) -> list[Labels]:
        """The living ranks of this node that train together with others."""
        return [
            source.labels
            for source, process in self._processes.known.items()
            if source.is_here
            and state_word(source.life.state) not in ENDED_STATES
            and process.rank is not None
            and not process.rank.is_beside
        ]

    @property
    def sources(self) -> Collection[Process]:
        return self._processes.known.keys()

    def keep(self, sources: Collection[Process]) -> None:
        """These are the processes of the run now, by their beginning.

        Others are gone, or have other labels.
        """
        for gone in self._processes.keep(sources):
            self._has_news = True
            self._world.update(gone, None)
            for detector in self._detectors:
                _contained(detector.forget, gone)
        for source, process in self._processes.known.items():
            ended = self.reports.ended.get(source.labels)
            # A link that was opened anew brings what had ended before.
            process.end_is_known |= ended is not None and ended.journal == source.reader.name

    def has_new_end(self) -> bool:
        """Whether a process has ended since the last poll."""
        known = self._processes.known.items()
        return any(not (each.is_at_work or process.end_is_known) for each, process in known)

    @errors.contained()
    def feed(self, source: Process, now_ns: int, *, due: bool) -> None:
        """Feed what is new of a process to all detectors.

        *due*: also where it is, since they are polled next.
        """
        process, labels = self._processes.known[source], source.labels
        if process.end_is_known:
            return
        rank = source.state()
        seen = process.observe(source, rank)
        if source.is_at_work:
            trains = bool(seen.steps) or source.trains
            self._world.update(labels, rank.own_world_size, trains)
            self._exits.note_at_work(labels)
        rank = rank._replace(world_size=self._world.size)
        self._has_news |= bool(seen.facts) or rank != process.rank
        process.rank = rank
        seen = seen._replace(now_ns=now_ns, nonfinite=source.nonfinite(now_ns))
        if due and source.is_at_work:
            source.host.watch()
            # This reads a file for each thread: only where there is a suspicion, and not where the
            # agent that leads the run asks.
            asked = self.judgement is None and labels in self.stalls.suspects
            evidence = source.host.evidence(now_ns) if asked else Evidence()
            seen = seen._replace(position=source.position(self._origin_ns), evidence=evidence)
        self._tell(rank, seen)

    def _tell(self, rank: RankState, seen: Observation) -> None:
        if self.judgement is None:
            for detector in self._detectors:
                _contained(detector.feed, rank, seen)

    def is_here(self, labels: Labels) -> bool:
        """Whether this is of this node: series of other nodes are theirs to export."""
        return _node(labels) in self._processes.nodes_here

    def poll(self, judgement: Judgement | None, now_ns: int) -> list[Change]:
        """What has changed. *judgement*: of the agent that leads the run, if another one does now.

        Nothing is found here while that agent judges; after that, what is found anew.
        """
        if judgement is None and self.judgement is not None:
            self._processes.forget()
            self._begin()
        self.judgement = judgement
        for left_out in self._processes.newly_left_out():
            self._has_news = True
            for detector in self._detectors:
                _contained(detector.leave_out, left_out)
        self._feed_ends(now_ns)
        if judgement is not None:
            self._ras.forget()
            self.reports.last_led, self.last_report = judgement, judgement.report
            # The lead's own detectors request what they need to know.
            return []
        changes = self._poll_detectors(now_ns)
        _contained(self._ask_nccl, now_ns)
        for labels, question in self.stalls.questions.items():
            if (source := self._processes.living(labels)) is not None:
                source.host.ask(question, now_ns)
        return changes

    def _poll_detectors(self, now_ns: int) -> list[Change]:
        # Ranks that ended stood before that, if they did: so deaths come before stalls.
        stall, unheard = self.stalls.summary, self._silence.unheard
        changes = [*_contained(self._deaths.poll, now_ns, stall, unheard)]
        changes += _contained(self._silence.poll, now_ns)
        changes += _contained(self.stalls.poll, now_ns, self._silence.unheard)
        changes += _contained(self.stragglers.poll, now_ns)
        for each in self._others:
            changes += _contained(each.poll, now_ns)
        return changes

    def _ask_nccl(self, now_ns: int) -> None:
        """Ask NCCL itself, once all ranks stand."""
        if not self.stalls.present():
            self._ras.forget()
            return
        here = [(each, known.rank) for each, known in self._processes.known.items() if each.is_here]
        pids = {each.reader.pid for each, rank in here if rank is not None and rank.under_nccl}
        if pids and (answer := self._ras.poll(now_ns)):
            self.stalls.remark = remark(answer, pids, self._world.size)

    def _feed_ends(self, now_ns: int) -> None:
        self._exits.new = []
        for source, process in self._processes.known.items():
            if source.is_at_work or process.end_is_known:
                continue
            process.end_is_known = True
            labels = source.labels
            newest = self._processes.newest.get(labels)
            if newest is not source or self._processes.living(labels) is not None:
                # A new process had these labels before the agent saw the end of this one.
                source.host.forget()
                continue
            self._world.update(labels, None)
            self._has_news = True
            self.reports.ended[labels] = source.describe()
            rank = source.state()._replace(world_size=self._world.size)
            ended, position = self._exits.add(source, now_ns), source.position(self._origin_ns)
            self._tell(rank, Observation(now_ns, position=position, ended=ended))
        for ended in self._exits.poll(now_ns):
            seen = Observation(now_ns, ended=ended)
            _contained(self._deaths.feed, RankState(ended.labels), seen)

    def ended_with(self, verdict: Verdict) -> Collection[Labels]:
        """The ranks whose end ended this verdict."""
        return self._exits.new or (self.stalls.ended if verdict.kind == "stall" else ())

    def present(self) -> list[Verdict]:
        """The open verdicts whose figures move, as they are now."""
        return [verdict for each in self._detectors for verdict in _contained(each.present)]

    def report(self) -> Report:
        """How the ranks compare; worked out again where there is news of them here."""
        if self.last_report is None or (self._has_news and self.judgement is None):
            self.last_report, self._has_news = self.stragglers.report(), False
        return self.last_report

    def close(self) -> None:
        """The run is not shown any more."""
        self._exits.forget_all()
        self._ras.forget()


@errors.contained(default=())
def _contained(method: Callable[..., Iterable[Any] | None], *given: Any) -> Iterable[Any]:
    """A detector that breaks takes nothing from the others, nor from other runs."""
    return method(*given) or ()
