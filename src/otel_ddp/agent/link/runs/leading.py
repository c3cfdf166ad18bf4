"""A run that this agent leads: takes what the agents of its other nodes report, and answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from otel_ddp import errors
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.runs import pack
from otel_ddp.agent.link.runs.elsewhere import Asked, AskedElsewhere
from otel_ddp.agent.link.runs.node_source import NodeSource
from otel_ddp.agent.link.runs.said import Said
from otel_ddp.agent.link.runs.wall_clock import WallClock
from otel_ddp.agent.verdicts.judgement import Judgement
from otel_ddp.agent.verdicts.source import Source
from otel_ddp.diagnosis.say import about, first_of, plural
from otel_ddp.diagnosis.verdict import Labels, run_labels

if TYPE_CHECKING:
    from otel_ddp.agent.link.server import LinkServer

# The nodes are told so often how the run is judged, and at once where that has changed.
_SAY_EVERY_NS = 3_000_000_000
_SAY_CHANGED_EVERY_NS = 500_000_000
# Of many ranks it is told less often how each compares.
_MANY_RANKS, _SAY_OF_RANKS = 512, 3
# A node that was not heard for so long, while others make steps, is judged by its own agent.
_LEFT_OUT_NS = 20_000_000_000
_MOVED_NS = 5_000_000_000
_TOLD_UNHEARD_NS = 5_000_000_000
# The next round comes within this, or this agent was held up and heard no node meanwhile.
_ROUND_NS = 5_000_000_000
_MOST_PROCESSES = 1024
# Of all nodes: as many as the door takes, and twice the ranks of the largest run that is judged.
_MOST_NODES, _MOST_OF_RUN = 2048, 20_480
_MOST_NAMED = 4
# A person's question goes to so many processes of one rank: each may take seconds to answer.
_MOST_ASKED = 4


class _Node:
    """One other node of the run."""

    def __init__(self, agent: int, lead_node: str) -> None:
        self._lead_node = lead_node
        self.agent = agent
        self.heard_ns = 0
        self.sources: dict[int, NodeSource] = {}
        self.dropped_steps = 0

    def feed(self, run: Labels, report: Any, now_ns: int, most: int) -> Iterator[NodeSource]:
        """Take a report in; the processes that have news by it. *most*: it may have so many."""
        known, self.sources = self.sources, {}
        if report.agent != self.agent:
            # Its agent was started again, and gives its processes other numbers.
            self.agent, known = report.agent, {-1 - at: each for at, each in known.items()}
        for process in report.processes[: min(_MOST_PROCESSES, most)]:
            source = known.get(process.id)
            try:
                if process.HasField("state"):
                    source = self._described(run, known, process.state, report.clock_offset_ns)
                if source is not None:
                    self.sources[process.id] = source
                    source.feed(process, report.clock_offset_ns, now_ns)
                    yield source
            except pack.Senseless as what:
                errors.warn_once("link", "a report of %s makes no sense: %s", report.node, what)

    def _described(
        self, run: Labels, known: dict[int, NodeSource], state: Any, clock_offset_ns: int
    ) -> NodeSource:
        for each in known.values():
            if each.is_described_by(state):
                return each
        labels = pack.unpack_labels(state)
        if run_labels(labels) != run:
            raise pack.Senseless("a process of another run")
        if dict(labels)["node"] == self._lead_node:
            raise pack.Senseless("a process of the lead's own node")
        return NodeSource(state, clock_offset_ns)


class Leading:
    """One a run. Called from the agent's loop alone."""

    def __init__(
        self,
        run: Labels,
        node: str,
        server: LinkServer,
        keep_history: Callable[[str, Collection[bytes]], None],
        clock: WallClock,
    ) -> None:
        """*node*: of this agent; *clock*: its own.

        *keep_history*: takes a node, and parts of its history.
        """
        self._run, self._own_node = run, node
        self._server = server
        self._keep_history = keep_history
        self._clock = clock
        self._asked = AskedElsewhere()
        self._nodes: dict[str, _Node] = {}
        self._fresh: list[NodeSource] = []
        self._moved_ns = 0
        self._now_ns = 0
        # How many processes more there may be.
        self._room = _MOST_OF_RUN
        self._has_twin = False
        self._said: Said | None = None
        self._said_ns = self._says = 0

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def poll(self, here: Collection[Source], now_ns: int) -> None:
        """Take in what is new. *here*: the processes of the run on this node."""
        for source in self._fresh:
            source.forget_news()
        held_up_ns = now_ns - self._now_ns - _ROUND_NS if self._now_ns else 0
        for node in self._nodes.values() if held_up_ns > 0 else ():
            # Links that were lost by that need some rounds until they are there again.
            node.heard_ns += held_up_ns
        self._fresh, self._now_ns = [], now_ns
        if any(each.steps()[0] for each in here):
            self._moved_ns = now_ns
        self._room = _MOST_OF_RUN - sum(len(each.sources) for each in self._nodes.values())
        for name, report in self._server.take():
            self._take(name, report, now_ns)
        for node in self._nodes.values():
            is_left_out = self._is_left_out(node)
            is_silent = now_ns - node.heard_ns > _TOLD_UNHEARD_NS
            for source in node.sources.values():
                source.is_left_out = is_left_out
                source.silent_since_ns = node.heard_ns if is_silent else 0

    @errors.contained()
    def _take(self, name: str, report: Any, now_ns: int) -> None:
        self._has_twin |= name == self._own_node
        if name == self._own_node or not report.HasField("clock_offset_ns"):
            return
        node = self._nodes.get(name)
        if node is None:
            if len(self._nodes) >= _MOST_NODES:
                del self._nodes[min(self._nodes, key=lambda each: self._nodes[each].heard_ns)]
            node = self._nodes[name] = _Node(report.agent, self._own_node)
        node.heard_ns, node.dropped_steps = now_ns, report.dropped_steps
        # The offset is to this node's clock as it is set now. The judge's goes on without jumps.
        report.clock_offset_ns -= self._clock.set_by_ns
        before = len(node.sources)
        self._fresh += node.feed(self._run, report, now_ns, self._room + before)
        self._room += before - len(node.sources)
        self._keep_history(name, report.history)
        for each in report.told:
            self._asked.take(each)

    def sources(self) -> Iterator[NodeSource]:
        """The processes of the other nodes. Threads of the endpoint ask as well."""
        for node in list(self._nodes.values()):
            yield from list(node.sources.values())

    def _is_left_out(self, node: _Node) -> bool:
        silent_ns = self._now_ns - node.heard_ns
        return silent_ns > _LEFT_OUT_NS and self._now_ns - self._moved_ns < _MOVED_NS

    def ask_stacks(self, rank: int) -> list[dict[str, Any]]:
        """The stacks of this rank. Threads of the endpoint ask."""
        found = []
        for source in self.sources():
            process = source.describe()
            if process.rank == rank and source.is_at_work:
                why = {"why": f"the agent of {process.node} has not answered"}
                found.append(
                    {**(self._asked.stacks(source) or why), "rank": rank, "pid": process.pid}
                )
            if len(found) == _MOST_ASKED:
                break
        return found

    def answer(self, judgement: Judgement | None, now_ns: int) -> None:
        """Ask the other nodes, and tell them how the run is judged."""
        said = self._new_said(judgement, now_ns)
        asked: dict[NodeSource, list[Asked]] = {}
        for each in self._asked.questions():
            asked.setdefault(each.source, []).append(each)
        for name, node in self._nodes.items():
            answer = wire.Answer()
            for number, source in node.sources.items():
                for question in source.questions:
                    answer.questions.add(process=number, kind=pack.QUESTIONS[question])
                source.questions.clear()
                for each in asked.get(source, ()):
                    kind = wire.Question.STACKS
                    answer.questions.add(process=number, kind=kind, number=each.number)
            if said is not None:
                answer.judged = said.to(name)
            if answer.questions or answer.judged:
                self._server.answer(name, answer)

    def _new_said(self, judgement: Judgement | None, now_ns: int) -> Said | None:
        before, since_ns = self._said, now_ns - self._said_ns
        if judgement is None or not self._nodes or since_ns < _SAY_CHANGED_EVERY_NS:
            return None
        # To pack what is said of thousands of ranks takes a third of a second.
        few = len(judgement.report.ranks) <= _MANY_RANKS
        said = Said(judgement, of_ranks=few or self._says % _SAY_OF_RANKS == 0)
        if before is not None and before.of_all == said.of_all and since_ns < _SAY_EVERY_NS:
            return None
        self._says += 1
        self._said, self._said_ns = said, now_ns
        return said

    def judgement(self) -> Judgement | None:
        """None: the judge of this node judges the run."""
        return None

    def describe(self) -> str:
        """For `status`."""
        if self._has_twin:
            return (
                f"another node of the run is called {self._own_node} too, and is judged by its own "
                "agent: give each node a name (OTEL_DDP_NODE)"
            )
        others = "and waits for its other nodes"
        if count := len(self._nodes):
            others = f"with {count} other node{plural(self._nodes)}"
        sentences = [f"this agent leads the run, {others}: {self._server.state}"]
        silent = {
            name: self._now_ns - node.heard_ns
            for name, node in self._nodes.items()
            if self._now_ns - node.heard_ns > _TOLD_UNHEARD_NS
            and any(each.is_at_work for each in node.sources.values())
        }
        if silent:
            names = first_of(sorted(silent), _MOST_NAMED)
            sentences.append(f"{names} not heard for {about(max(silent.values()) / 1e9)}")
        if dropped := sum(node.dropped_steps for node in self._nodes.values()):
            sentences.append(f"{dropped} steps of other nodes were dropped on the way")
        if late := self._server.dropped:
            sentences.append(
                f"{late} reports were dropped, as this agent was too busy to read them"
            )
        if refused := self._server.refused:
            reasons = ", ".join(f"{why} {count}" for why, count in refused.items())
            sentences.append(f"refused of what others sent: {reasons}")
        return "; ".join(sentences)
