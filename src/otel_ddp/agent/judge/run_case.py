"""One run: feeds its processes to the detectors, and polls the detectors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from otel_ddp import errors
from otel_ddp.agent.judge.answers import Ras, remark
from otel_ddp.agent.judge.reports import Judgement, RunReports
from otel_ddp.agent.reading.process import Process
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


class _Process:
    """The judge's state of one process."""

    def __init__(self) -> None:
        self.end_is_known = False
        self.rank: RankState | None = None
        self._device: DeviceSteps | None = None

    def observe(self, source: Process, rank: RankState) -> Observation:
        """The process's new steps. If the device has a clock, this clock times steps and waits."""
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
    """All processes of a run, with the judge's state of each."""

    def __init__(self) -> None:
        self.known: dict[Process, _Process] = {}
        self.newest: dict[Labels, Process] = {}
        self._left_out: set[Process] = set()
        self.nodes_here: set[str] = set()

    def keep(self, sources: Collection[Process]) -> set[Labels]:
        """Set the current processes, oldest first. Returns the labels that have no process now."""
        before, self.known = (
            self.known,
            {each: self.known.get(each) or _Process() for each in sources},
        )
        self.newest = {each.labels: each for each in sources}
        self.nodes_here |= {_node(each.labels) for each in sources if each.is_here}
        gone = {each.labels for each, known in before.items() if not known.end_is_known}
        return gone - self.newest.keys()

    def newly_left_out(self) -> list[Labels]:
        """The labels of living processes that were excluded from judging since the last call.

        Resets the judge's state of these processes.
        """
        before = self._left_out
        self._left_out = {each for each in self.known if each.is_left_out and each.is_at_work}
        new = self._left_out - before
        self.known.update((each, _Process()) for each in new)
        return [each.labels for each in new]

    def forget(self) -> None:
        """Reset the state of each process."""
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
    """Finds the world size of the training among the sizes that processes report: evaluators and
    actors report other sizes."""

    def __init__(self) -> None:
        self._known = World(0, trains=False)
        self._of: dict[Labels, World] = {}
        # The number of processes that report each world; mostly all report the same.
        self._counts: Counter[World] = Counter()

    @property
    def size(self) -> int:
        return self._known.size

    def update(self, labels: Labels, size: int | None, trains: bool = False) -> None:
        """Update with the world size that a process reports. *size*: None if the process is gone.

        *trains*: whether the process has made steps, or is known to be going to.
        """
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
        # Whether any process of this run has trained.
        trained = self._known.trains or any(each.trains for each in living)
        last = World(self._known.size, trained)
        self._known = World(training_world(living, last), trained)


# How long after a process has ended to look again for the cause. Other ranks that end report so
# soon after the first. The exit status is known only after the process has exited, which takes
# Python seconds, and after its launcher has reaped it, which may take 5 s more.
_LOOK_AGAIN_AFTER_NS = (500_000_000, 2_000_000_000, 6_000_000_000, 20_000_000_000)


class _Exit:
    """The end of a process, and the times at which to look again for its cause."""

    def __init__(self, ended: EndedProcess, now_ns: int) -> None:
        self.ended = ended
        self.found_ns = now_ns
        self.looks_ns = [now_ns + after for after in _LOOK_AGAIN_AFTER_NS]


class Exits:
    """The ended processes of one run."""

    def __init__(self) -> None:
        self.new: list[Labels] = []
        """The labels of processes that ended in the last poll."""
        self._ended: set[Labels] = set()
        self._exits: dict[Process, _Exit] = {}

    def add(self, source: Process, now_ns: int) -> EndedProcess:
        """Add a process; returns its end, as far as known now."""
        ended = source.end()
        self.new.append(ended.labels)
        self._ended.add(ended.labels)
        self._exits[source] = _Exit(ended, now_ns)
        return ended

    def note_at_work(self, labels: Labels) -> None:
        """To be called for a living process. If an earlier process with its labels has ended, the
        run has restarted, so stop looking for the causes of all ends."""
        if labels in self._ended:
            self._ended.remove(labels)
            self.forget_all()

    def poll(self, now_ns: int) -> list[EndedProcess]:
        """All ends, if this poll looked again for the cause of at least one; else none."""
        looked = False
        for source, each in self._exits.items():
            # A process may exist for a while after it has recorded its end: note when it was last
            # present.
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
        # Return all ends, since a verdict also depends on the times at which other ranks exited.
        return found

    def forget_all(self) -> None:
        """Stop looking for the causes of all ends."""
        for source in self._exits:
            source.host.forget()
        self._exits.clear()


class RunCase:
    """The state of the judge for one run: its processes, detectors and reports. The judge feeds and
    polls it; series and notifications read it."""

    def __init__(
        self,
        run: Labels,
        floor_s: float,
        origin_ns: int,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        """*floor_s*: the shortest stall limit. *origin_ns*: wall time when the monotonic clock was
        0."""
        self.run = run
        self._floor_s = floor_s
        self._origin_ns = origin_ns
        self._processes = _Processes()
        self._ras = Ras(env)
        self.reports = RunReports(run)
        self.judgement: Judgement | None = None
        """The judgement by the agent that leads the run; None if this agent leads it."""
        self._begin()

    def _begin(self) -> None:
        """Start with fresh detectors."""
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
        """The last comparison of the ranks, by the agent that leads the run."""
        self._has_news = True

    @property
    def training(self) -> list[RankState]:
        """The living ranks that train together: no evaluators, no actors."""
        known = self._processes.known.items()
        ranks = [process.rank for source, process in known if source.is_at_work]
        return [rank for rank in ranks if rank is not None and not rank.is_beside]

    @property
    def sources(self) -> Collection[Process]:
        return self._processes.known.keys()

    def keep(self, sources: Collection[Process]) -> None:
        """Set the current processes, oldest first; *sources* must contain all of them."""
        for gone in self._processes.keep(sources):
            self._has_news = True
            self._world.update(gone, None)
            for detector in self._detectors:
                _contained(detector.forget, gone)
        for source, process in self._processes.known.items():
            ended = self.reports.ended.get(source.labels)
            # After a reconnect, the agent on another node sends its ended processes again. Their
            # ends have been reported already.
            process.end_is_known |= ended is not None and ended.journal == source.reader.name

    def has_new_end(self) -> bool:
        """Whether a process has ended since the last poll."""
        known = self._processes.known.items()
        return any(not (each.is_at_work or process.end_is_known) for each, process in known)

    @errors.contained()
    def feed(self, source: Process, now_ns: int, *, due: bool) -> None:
        """Feed the news of a process to all detectors.

        *due*: whether the detectors are polled next, so that they need the process's position.
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
            # Collecting evidence reads files of /proc, so do it only for ranks suspected of
            # hanging, and not while another agent leads this run.
            asked = self.judgement is None and labels in self.stalls.suspects
            evidence = source.host.evidence(now_ns) if asked else Evidence()
            seen = seen._replace(position=source.position(self._origin_ns), evidence=evidence)
        self._feed(rank, seen)

    def _feed(self, rank: RankState, seen: Observation) -> None:
        if self.judgement is None:
            for detector in self._detectors:
                _contained(detector.feed, rank, seen)

    def is_here(self, labels: Labels) -> bool:
        """Whether the labels are of this node. A node exports the series of its own ranks only."""
        return _node(labels) in self._processes.nodes_here

    def poll(self, judgement: Judgement | None, now_ns: int) -> list[Change]:
        """Poll the detectors. *judgement*: by the agent that leads the run; None if this one does.

        While another agent leads, the detectors of this agent are not used; afterwards they start
        afresh.
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
            # Don't ask ranks for their stacks: the agent that leads the run does.
            return []
        changes = self._poll_detectors(now_ns)
        _contained(self._query_nccl, now_ns)
        for labels, question in self.stalls.questions.items():
            if (source := self._processes.living(labels)) is not None:
                source.host.ask(question, now_ns)
        return changes

    def _poll_detectors(self, now_ns: int) -> list[Change]:
        # Poll deaths before stalls, since a rank that died is no longer stalled.
        stall, unheard = self.stalls.summary, self._silence.unheard
        changes = [*_contained(self._deaths.poll, now_ns, stall, unheard)]
        changes += _contained(self._silence.poll, now_ns)
        changes += _contained(self.stalls.poll, now_ns, self._silence.unheard)
        changes += _contained(self.stragglers.poll, now_ns)
        for each in self._others:
            changes += _contained(each.poll, now_ns)
        return changes

    def _query_nccl(self, now_ns: int) -> None:
        """Ask NCCL, once per stall, which peers it does not reach."""
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
                # Ignore this end: when it was noticed, a new process with the same labels had
                # already started.
                source.host.forget()
                continue
            self._world.update(labels, None)
            self._has_news = True
            self.reports.ended[labels] = source.describe()
            rank = source.state()._replace(world_size=self._world.size)
            ended, position = self._exits.add(source, now_ns), source.position(self._origin_ns)
            self._feed(rank, Observation(now_ns, position=position, ended=ended))
        for ended in self._exits.poll(now_ns):
            seen = Observation(now_ns, ended=ended)
            _contained(self._deaths.feed, RankState(ended.labels), seen)

    def ended_with(self, verdict: Verdict) -> Collection[Labels]:
        """The ranks whose ends closed this verdict."""
        return self._exits.new or (self.stalls.ended if verdict.kind == "stall" else ())

    def present(self) -> list[Verdict]:
        """The open verdicts with their current figures."""
        return [verdict for each in self._detectors for verdict in _contained(each.present)]

    def report(self) -> Report:
        """The comparison of the ranks, recomputed if the ranks have new data."""
        if self.last_report is None or (self._has_news and self.judgement is None):
            self.last_report, self._has_news = self.stragglers.report(), False
        return self.last_report

    def close(self) -> None:
        """Release the resources of this run."""
        self._exits.forget_all()
        self._ras.forget()


@errors.contained(default=())
def _contained(method: Callable[..., Iterable[Any] | None], *given: Any) -> Iterable[Any]:
    """Call a detector's method; an error of one detector affects neither others nor other runs."""
    return method(*given) or ()
