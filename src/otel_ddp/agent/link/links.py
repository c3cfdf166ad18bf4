"""Decides which runs this agent leads, and which it follows, and opens and closes their links."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_ddp import errors
from otel_ddp.agent.history.histories import Collector
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.reading.process import Process
from otel_ddp.agent.verdicts.judge import Judge
from otel_ddp.agent.verdicts.reports import Judgement
from otel_ddp.diagnosis.verdict import Labels, run_labels
from otel_ddp.history.terminal import where_to_look
from otel_ddp.identity import lead as lead_facts
from otel_ddp.identity.lead import Lead
from otel_ddp.journal.process_state import ProcessState

if TYPE_CHECKING:
    from otel_ddp.agent.link.channel import LinkThread
    from otel_ddp.agent.link.leading import Leading

# A link goes on for so long after the last process here has ended: others may end later.
_AFTER_END_NS = 60_000_000_000
# What one agent judges within a core and a gigabyte.
_MOST_RANKS = 10_240
# Of larger runs each node writes the history of its own ranks: no picture shows so many.
_MOST_RANKS_OF_HISTORY = 512
# Of other nodes; in the agent's file, which is written every second.
_MOST_SHOWN = 1024


class Wanted(NamedTuple):
    """What the processes of a run on this node say of its lead."""

    fact: Lead
    leads: bool
    world_size: int


class _Open(NamedTuple):
    """A link that is open, and the lead as it was known when it was opened."""

    wanted: Wanted
    link: Any
    """Leading if this agent leads the run, else Following."""

    def goes_on(self, wanted: Wanted) -> bool:
        """Whether it is the wanted one. Rank 0 may have ended first: who leads does so to the end.

        A rank 0 on another node draws another secret.
        """
        same = self.wanted.fact.secret == wanted.fact.secret
        return wanted == self.wanted or (same and self.wanted.leads)


class Links:
    """One an agent. Called from its loop, which waits for a link for a moment to close it."""

    def __init__(
        self, node: str, collector: Collector, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._node = node
        self._collector = collector
        self._clock = clock
        # All times are on this clock, as the judge's: it goes on without jumps.
        self._origin_ns = time.time_ns() - clock()
        self._thread: LinkThread | None = None
        self._open: dict[Labels, _Open] = {}
        self._at_work_ns: dict[Labels, int] = {}
        # Why the ranks here are compared with those of no other node, of runs that have more ranks.
        self._why_alone: dict[Labels, str] = {}

    def _now_ns(self) -> int:
        return self._origin_ns + self._clock()

    def threads(self) -> Iterator[KeptThread]:
        """Those that have to run."""
        if self._thread is not None:
            yield self._thread.thread

    @errors.contained()
    def poll(self, here: Collection[Process]) -> None:
        """Once a round, before the judge. *here*: the processes of this node."""
        now_ns = self._now_ns()
        by_run: dict[Labels, list[Process]] = {}
        for source in here:
            by_run.setdefault(run_labels(source.labels), []).append(source)
        # More may be known of their ends than their journals say.
        by_run.update({run: [] for run in self._open.keys() - by_run.keys()})
        self._at_work_ns = {run: at for run, at in self._at_work_ns.items() if run in by_run}
        self._why_alone = {run: why for run, why in self._why_alone.items() if run in by_run}
        for run, of in by_run.items():
            # An agent may start when they have ended already.
            at_ns = (now_ns if each.is_at_work else each.ended_ns for each in of)
            self._at_work_ns[run] = max([self._at_work_ns.get(run, 0), *at_ns])
        for run, sources in by_run.items():
            self._update(run, sources, now_ns)
        for run, each in self._open.items():
            each.link.poll(by_run[run], now_ns)

    def _update(self, run: Labels, sources: Collection[Process], now_ns: int) -> None:
        if now_ns - self._at_work_ns.get(run, 0) > _AFTER_END_NS:
            if not self._goes_on_elsewhere(run):
                self._close(run)
                return
            self._at_work_ns[run] = now_ns
        if not sources:
            return
        wanted, known = wanted_by(sources), self._open.get(run)
        if wanted is None or wanted.world_size > _MOST_RANKS:
            # The last attempt may have had a link.
            self._close(run)
            if why := _why_alone(sources):
                self._why_alone[run] = why
            return
        if known is not None and known.goes_on(wanted):
            return
        # The first link of the run; or a new attempt, which may have another lead.
        opened = self._opened(run, wanted)
        self._close(run)
        self._open[run] = opened
        opened.link.start()

    def _opened(self, run: Labels, wanted: Wanted) -> _Open:
        # Protobuf and cryptography are loaded for runs on several nodes alone.
        from otel_ddp.agent.link.channel import LinkThread
        from otel_ddp.agent.link.client import LinkClient
        from otel_ddp.agent.link.following import Following
        from otel_ddp.agent.link.leading import Leading
        from otel_ddp.agent.link.server import LinkServer

        if self._thread is None:
            self._thread = LinkThread()
            self._thread.start()
        fact = wanted.fact
        secret = bytes.fromhex(fact.secret)
        ends: Any = {"node": self._node, "hosts": fact.hosts, "ports": fact.ports}
        is_kept = wanted.world_size <= _MOST_RANKS_OF_HISTORY
        if wanted.leads:
            server = LinkServer(self._thread, secret, clock=self._now_ns, **ends)
            history = self._collector if is_kept else None
            return _Open(wanted, Leading(run, self._node, server, history))
        client = LinkClient(self._thread, secret, **ends)
        readings = partial(self._collector.readings, _key(run)) if is_kept else None
        following, before = Following(run, client, self._origin_ns, readings), self._open.get(run)
        if before is not None and not before.wanted.leads:
            following.take_over(before.link)
        return _Open(wanted, following)

    def _close(self, run: Labels) -> None:
        self._why_alone.pop(run, None)
        if (known := self._open.pop(run, None)) is not None:
            known.link.stop()

    def fresh(self) -> Iterator[Process]:
        """Those of `sources` of which there are news."""
        for each in self._leading():
            yield from each.fresh()

    def sources(self) -> Iterator[Process]:
        """The processes of other nodes of the runs that this agent leads."""
        for each in self._leading():
            yield from each.sources()

    def _leading(self) -> list[Leading]:
        # The endpoint's threads ask while the loop goes on.
        opened = list(self._open.values())
        return [each.link for each in opened if each.wanted.leads]

    def _goes_on_elsewhere(self, run: Labels) -> bool:
        known = self._open.get(run)
        led = known.link.sources() if known is not None and known.wanted.leads else ()
        return any(each.is_at_work and not each.host.silent_since_ns for each in led)

    def going_on_elsewhere(self) -> set[Labels]:
        """The runs that this agent leads with processes at work on nodes that are heard."""
        return {run for run in self._open if self._goes_on_elsewhere(run)}

    def any_at_work(self, here: Collection[Process]) -> bool:
        """Whether a process of a run with a link is at work."""
        linked = [each for each in here if run_labels(each.labels) in self._open]
        return any(each.is_at_work for each in (*linked, *self.sources()))

    def elsewhere(self) -> list[ProcessState]:
        """The processes of other nodes, for people."""
        return [each.describe_now() for each in islice(self.sources(), _MOST_SHOWN)]

    def ask_stacks(self, group: str, run: str, rank: int) -> list[dict[str, Any]]:
        """The stacks of this rank, if it runs on another node. Threads of the endpoint ask."""
        return [
            row
            for each in self._leading()
            if each.key == (group, run)
            for row in each.ask_stacks(rank)
        ]

    def judgements(self) -> Mapping[Labels, Judgement]:
        """What other agents say of the runs that they lead now."""
        return {
            run: judgement
            for run, each in self._open.items()
            if not each.wanted.leads and (judgement := each.link.judgement()) is not None
        }

    @errors.contained()
    def answer(self, judge: Judge) -> None:
        """Once a round, after the judge: tell the other nodes what it asks and says."""
        now_ns = self._now_ns()
        for each in self._leading():
            each.answer(judge.judgement(each.run, self._node), now_ns)

    def describe(self) -> list[dict[str, str]]:
        """A sentence on each run that has several nodes."""
        found = []
        for run, each in list(self._open.items()):
            led = None if each.wanted.leads else each.link.judgement()
            look = where_to_look("" if led is None else led.by)
            found.append({**dict(run), "sentence": each.link.describe(), "look": look})
        unled = [{**dict(run), "sentence": why} for run, why in list(self._why_alone.items())]
        return found + unled

    def stop(self) -> None:
        """Close all links."""
        for run in list(self._open):
            self._close(run)
        if self._thread is not None:
            self._thread.stop()


def wanted_by(sources: Collection[Process]) -> Wanted | None:
    """By the newest process that knows a lead; None: this node has all ranks, or none knows one.

    An attempt whose processes know none has none, whatever those of the last one knew.
    """
    found = [(each, fact) for each in sources if (fact := lead_facts.parse(each.fact("lead")))]
    if not found:
        return None
    newest, fact = max(found, key=lambda each: (each[0].is_at_work, each[0].began_ns))
    if not newest.is_at_work and any(
        each.is_at_work and each.began_ns > newest.ended_ns for each in sources
    ):
        return None
    # Attempts may share a secret, since torchrun does not count a restart that a new node causes.
    # So processes that ended before the newest one began are left out.
    of_attempt = [
        each
        for each, known in found
        if known.secret == fact.secret and (each.is_at_work or each.ended_ns >= newest.began_ns)
    ] or [newest]
    world_size = max(each.state().own_world_size or 0 for each in of_attempt)
    leads = any(
        each.global_rank == 0 and each.state().own_world_size == world_size for each in of_attempt
    )
    ranks = {each.global_rank for each in of_attempt}
    if leads and len(ranks) >= world_size:
        return None
    # Rank 0 knows best where its own agent is reached.
    facts = [known for each, known in found if each in of_attempt]
    return Wanted(max(facts, key=lambda known: len(known.hosts)), leads, world_size)


def _why_alone(sources: Collection[Process]) -> str:
    """Why these ranks have no link, if the run has more of them; empty if it has not."""
    worlds = [(each.state().own_world_size or 0, each) for each in sources if each.is_at_work]
    world_size = max((size for size, _ in worlds), default=0)
    here = {each.global_rank for size, each in worlds if size == world_size}
    if len(here) >= world_size:
        return ""
    why = "they name no lead (no process group yet, or OTEL_DDP_LEAD=off)"
    if world_size > _MOST_RANKS:
        why = f"one agent compares {_MOST_RANKS} at most"
    known = f"{len(here)} of {world_size} ranks are known here"
    return f"{known} and compared with each other alone: {why}"


def _key(run: Labels) -> tuple[str, str]:
    """What its histories know it by."""
    known = dict(run)
    return known.get("group", ""), known.get("run", "")
