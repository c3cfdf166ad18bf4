"""Decides which runs this agent leads and which it follows; opens and closes their links.

To lead a run is to judge it for all nodes. The agents on the other nodes follow: they report to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_ddp import errors
from otel_ddp.agent.history.histories import Collector
from otel_ddp.agent.judge.judge import Judge
from otel_ddp.agent.judge.reports import Judgement
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.reading.process import Process
from otel_ddp.diagnosis.verdict import Labels, run_labels
from otel_ddp.history.terminal import where_to_look
from otel_ddp.identity import lead as lead_facts
from otel_ddp.identity.lead import Lead
from otel_ddp.journal.process_state import ProcessState

if TYPE_CHECKING:
    from otel_ddp.agent.link.channel import LinkThread
    from otel_ddp.agent.link.leading import Leading

# How long a link stays open after the run's last process on this node has ended, since processes
# on other nodes may end later.
_AFTER_END_NS = 60_000_000_000
# How long the link stays open at most if the lead has not received all ends of processes, since a
# broken network may recover.
_UNHEARD_NS = 600_000_000_000
# Larger runs get no links. One agent judges this many ranks with one core and a gigabyte.
_MOST_RANKS = 10_240
# In larger runs, each node writes the history of its own ranks, since charts show no more ranks.
_MOST_RANKS_OF_HISTORY = 512
# Limit of remote processes in the agent's file, as the agent rewrites this file every second.
_MOST_SHOWN = 1024


class Wanted(NamedTuple):
    """The lead of a run, as this node's processes of the run have recorded it."""

    fact: Lead
    leads: bool
    world_size: int


class _Open(NamedTuple):
    """An open link, with the lead that was wanted when it was opened."""

    wanted: Wanted
    link: Any
    """A `Leading` if this agent leads the run, else a `Following`."""

    def goes_on(self, wanted: Wanted) -> bool:
        """Whether this link can stay open if *wanted* is now recorded.

        After rank 0 has ended, its agent goes on leading as long as the secret stays the same. Only
        a new rank 0 draws a new secret, and it may be on another node.
        """
        same = self.wanted.fact.secret == wanted.fact.secret
        return wanted == self.wanted or (same and self.wanted.leads)


class Links:
    """All links of one agent. The agent's loop calls the methods. Closing a link blocks for a
    moment."""

    def __init__(
        self, node: str, collector: Collector, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._node = node
        self._collector = collector
        self._clock = clock
        # Read the wall clock once, and then add the progress of the monotonic clock, so that times
        # never jump. The judge has the same clock.
        self._origin_ns = time.time_ns() - clock()
        self._thread: LinkThread | None = None
        self._open: dict[Labels, _Open] = {}
        self._at_work_ns: dict[Labels, int] = {}
        # For each run that has ranks on other nodes but no link: why it has none.
        self._why_alone: dict[Labels, str] = {}

    def _now_ns(self) -> int:
        return self._origin_ns + self._clock()

    def threads(self) -> Iterator[KeptThread]:
        """The link thread, if this agent has had a link."""
        if self._thread is not None:
            yield self._thread.thread

    @errors.contained()
    def poll(self, here: Collection[Process]) -> None:
        """Update the links; called once per round, before the judge. *here*: this node's
        processes."""
        now_ns = self._now_ns()
        by_run: dict[Labels, list[Process]] = {}
        for source in here:
            by_run.setdefault(run_labels(source.labels), []).append(source)
        # Include runs whose journals are gone, since evidence about the ends of their ranks may
        # follow.
        by_run.update({run: [] for run in self._open.keys() - by_run.keys()})
        self._at_work_ns = {run: at for run, at in self._at_work_ns.items() if run in by_run}
        self._why_alone = {run: why for run, why in self._why_alone.items() if run in by_run}
        for run, of in by_run.items():
            # An ended process was at work until its end, even if this agent started later.
            at_ns = (now_ns if each.is_at_work else each.life.ended_ns for each in of)
            self._at_work_ns[run] = max([self._at_work_ns.get(run, 0), *at_ns])
        for run, sources in by_run.items():
            self._update(run, sources, now_ns)
        for run, each in self._open.items():
            each.link.poll(by_run[run], now_ns)

    def _update(self, run: Labels, sources: Collection[Process], now_ns: int) -> None:
        over_ns, known = now_ns - self._at_work_ns.get(run, 0), self._open.get(run)
        if over_ns > _AFTER_END_NS:
            if self._runs_remotely(run):
                self._at_work_ns[run] = now_ns
            elif known is None or known.link.has_all_ends() or over_ns > _UNHEARD_NS:
                self._close(run)
                return
        if not sources:
            return
        wanted = wanted_by(sources)
        if wanted is None or wanted.world_size > _MOST_RANKS:
            # The run needs no link, or is too large for one. A previous attempt may have had a
            # link.
            self._close(run)
            if why := _why_alone(sources):
                self._why_alone[run] = why
            return
        if known is not None and known.goes_on(wanted):
            return
        # This is the first link of the run, or the link of a new attempt, which may have another
        # lead.
        opened = self._opened(run, wanted)
        self._close(run)
        self._open[run] = opened
        opened.link.start()

    def _opened(self, run: Labels, wanted: Wanted) -> _Open:
        # Only a run on several nodes pays for importing protobuf and cryptography.
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
        key = dict(run)["group"], dict(run)["run"]
        readings = partial(self._collector.readings, key) if is_kept else None
        following, before = Following(run, client, self._origin_ns, readings), self._open.get(run)
        if before is not None and not before.wanted.leads:
            following.take_over(before.link)
        return _Open(wanted, following)

    def _close(self, run: Labels) -> None:
        self._why_alone.pop(run, None)
        if (known := self._open.pop(run, None)) is not None:
            known.link.stop()

    def fresh(self) -> Iterator[Process]:
        """The processes of `sources` with new records."""
        for each in self._leading():
            yield from each.fresh()

    def sources(self) -> Iterator[Process]:
        """The processes on other nodes that belong to runs that this agent leads."""
        for each in self._leading():
            yield from each.sources()

    def _leading(self) -> list[Leading]:
        # Iterate over a copy, since threads of the endpoint call this too.
        opened = list(self._open.values())
        return [each.link for each in opened if each.wanted.leads]

    def _runs_remotely(self, run: Labels) -> bool:
        known = self._open.get(run)
        led = known.link.sources() if known is not None and known.wanted.leads else ()
        return any(each.is_at_work and not each.host.silent_since_ns for each in led)

    def running_remotely(self) -> set[Labels]:
        """The runs that this agent leads and that have working processes on nodes that still
        report."""
        return {run for run in self._open if self._runs_remotely(run)}

    def any_at_work(self, here: Collection[Process]) -> bool:
        """Whether a process of a run with a link is at work."""
        linked = [each for each in here if run_labels(each.labels) in self._open]
        return any(each.is_at_work for each in (*linked, *self.sources()))

    def remote_states(self) -> list[ProcessState]:
        """The states of processes on other nodes, for `status` and the page."""
        return [each.describe_now() for each in islice(self.sources(), _MOST_SHOWN)]

    def ask_stacks(self, group: str, run: str, rank: int) -> list[dict[str, Any]]:
        """The stack of a rank on another node. Called by threads of the endpoint."""
        return [
            row
            for each in self._leading()
            if each.key == (group, run)
            for row in each.ask_stacks(rank)
        ]

    def judgements(self) -> Mapping[Labels, Judgement]:
        """For each run that another agent leads: the current judgement of that lead."""
        return {
            run: judgement
            for run, each in self._open.items()
            if not each.wanted.leads and (judgement := each.link.judgement()) is not None
        }

    @errors.contained()
    def answer(self, judge: Judge) -> None:
        """Send the judge's questions and judgements to the other nodes, once per round after the
        judge."""
        now_ns = self._now_ns()
        for each in self._leading():
            each.answer(judge.judgement(each.run, self._node), now_ns)

    def describe(self) -> list[dict[str, str]]:
        """A sentence on each run with several nodes."""
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
    """The lead of a run, from the newest process that has recorded one.

    None if this node has all ranks, or if a newer attempt has recorded no lead yet.
    """
    found = [(each, fact) for each in sources if (fact := lead_facts.parse(each.fact("lead")))]
    if not found:
        return None
    newest, fact = max(found, key=lambda each: (each[0].is_at_work, each[0].began_ns))
    if not newest.is_at_work and any(
        each.is_at_work and each.began_ns > newest.life.ended_ns for each in sources
    ):
        return None
    # Two attempts may have the same secret, since torchrun does not count a restart that a new node
    # causes. So ignore processes that ended before the newest one began: they are of an earlier
    # attempt.
    of_attempt = [
        each
        for each, known in found
        if known.secret == fact.secret
        and (each.is_at_work or each.life.ended_ns >= newest.began_ns)
    ] or [newest]
    world_size = max(each.state().own_world_size or 0 for each in of_attempt)
    leads = any(
        each.global_rank == 0 and each.state().own_world_size == world_size for each in of_attempt
    )
    ranks = {each.global_rank for each in of_attempt}
    if leads and len(ranks) >= world_size:
        return None
    # Of the recorded facts, use the one with the most addresses. Mostly, rank 0 has recorded it,
    # and rank 0 runs on the lead's node.
    facts = [known for each, known in found if each in of_attempt]
    return Wanted(max(facts, key=lambda known: len(known.hosts)), leads, world_size)


def _why_alone(sources: Collection[Process]) -> str:
    """Why these ranks have no link; empty if the run has no other ranks."""
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
