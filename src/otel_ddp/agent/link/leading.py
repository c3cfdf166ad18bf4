"""Leads a run: receives the reports of the agents on other nodes, and answers them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from otel_ddp import errors
from otel_ddp.agent.history.histories import Collector
from otel_ddp.agent.judge.answers import ANSWER_S, why_silent
from otel_ddp.agent.judge.reports import Judgement
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.messages import PackedJudgement, RemoteHost, Senseless, unpack_readings
from otel_ddp.agent.reading.process import Process
from otel_ddp.diagnosis.say import duration, first_of, plural
from otel_ddp.diagnosis.verdict import Labels, run_labels
from otel_ddp.journal.parser import Unreadable
from otel_ddp.journal.sent import ReceivedJournal

if TYPE_CHECKING:
    from otel_ddp.agent.link.server import LinkServer

# The lead (this agent) sends the verdicts on the run to the other nodes at this interval.
_JUDGE_EVERY_NS = 1_000_000_000
# For thousands of ranks, packing the verdicts takes a third of a second, so do it less often.
_MANY_RANKS, _JUDGE_MANY_EVERY_NS = 512, 5_000_000_000
# After this long without a report while other ranks step, a node's ranks are not compared.
_LEFT_OUT_NS = 20_000_000_000
_MOVED_NS = 5_000_000_000
_SILENT_NS = 5_000_000_000
# A process is forgotten if it is missing in this many reports of its node. One is not enough, since
# an agent may divide its processes among several reports.
_GONE_REPORTS = 8
# Smaller changes of a clock offset are ignored, since they are measuring errors.
_SAME_OFFSET_NS = 50_000_000
_MOST_NAMED = 4
# How long to wait for the stack of a remote process: its own time to answer, two rounds of the
# agent's loop, and two reports, which may be 3 s apart.
_ANSWERED_WITHIN_S, _LOOK_AGAIN_S = ANSWER_S + 8.0, 0.05


class _Node:
    """Another node of the run, with the processes that it reports."""

    def __init__(self, name: str, *, is_kept: bool = False) -> None:
        """*is_kept*: whether this agent writes the history of the node's ranks."""
        self.name = name
        self.heard_ns = self.ahead_ns = 0
        self.hosts: dict[bytes, RemoteHost] = {}
        """The node's processes, by the first bytes of their journals, which identify them."""
        self.lacking: list[wire.Lacking] = []
        """Parts of journals that the next answer asks the node to send again."""
        self._is_kept = is_kept
        self._reports = 0

    @property
    def lost(self) -> int:
        """How many of the node's records were overwritten before they were sent."""
        return sum(each.reader.lost for each in self.hosts.values())

    def hear(self, report: Any, now_ns: int) -> None:
        """Store the report's arrival time, and the node's clock offset, which corrects times."""
        self.heard_ns = now_ns
        # Ignore a small change of the offset, because each change shifts the times of all phases.
        if abs(report.clock_offset_ns - self.ahead_ns) > _SAME_OFFSET_NS:
            self.ahead_ns = report.clock_offset_ns

    def feed(
        self, report: Any, now_ns: int, written: Mapping[str, int] | None
    ) -> Iterator[RemoteHost]:
        """Read the processes in a report, and yield them.

        *written*: the offset up to which the history has each journal; None if unknown.
        """
        self._reports += 1
        for message in report.processes:
            try:
                host = self._take(message, now_ns, written)
            except (Senseless, Unreadable) as what:
                errors.warn_once("link", "a report of %s makes no sense: %s", self.name, what)
                continue
            host.clock_uncertainty_ns = report.clock_uncertainty_ns
            yield host
        oldest = self._reports - _GONE_REPORTS
        self.hosts = {head: each for head, each in self.hosts.items() if each.report > oldest}

    def _take(self, message: Any, now_ns: int, written: Mapping[str, int] | None) -> RemoteHost:
        host = self.hosts.get(message.head)
        if host is None:
            journal = ReceivedJournal(message.journal, message.head, self.ahead_ns)
            host = self.hosts[message.head] = RemoteHost(journal, is_kept=self._is_kept)
        # A process may get a new id, since a restarted agent numbers its processes anew.
        host.number, host.report = message.id, self._reports
        host.hear(message.known, self.ahead_ns, now_ns)
        journal = host.reader
        journal.set_clock(self.ahead_ns)
        journal.put(message.progress, message.totals, message.reason)
        if journal.is_new and self._is_kept:
            if written is None:
                return host
            # The history has the records up to this offset. Continue there, even if the report
            # begins at another one: the missing part is then requested.
            journal.resume(written.get(f"{host.node}/{journal.name}", 0))
        is_whole = journal.define(message.definitions)
        if not (journal.add(message.records, message.lost) and is_whole):
            places = {"defined": journal.defined, "position": journal.position}
            self.lacking.append(wire.Lacking(process=message.id, **places))
        return host

    def drop(self, host: RemoteHost) -> None:
        """Forget a process that belongs to another run or node."""
        self.hosts = {head: each for head, each in self.hosts.items() if each is not host}


class Leading:
    """Leads one run. Only the agent's loop calls the methods, except for `ask_stacks` and
    `sources`, which threads of the endpoint call too."""

    def __init__(
        self, run: Labels, node: str, server: LinkServer, history: Collector | None
    ) -> None:
        """*node*: the name of this agent's node. *history*: None if each node writes the history of
        its ranks."""
        self.run, self._own_node = run, node
        self.key = dict(run)["group"], dict(run)["run"]
        self._server = server
        self._history = history
        self._nodes: dict[str, _Node] = {}
        self._fresh: list[Process] = []
        self._moved_ns = 0
        self._now_ns = 0
        self._judged_ns = 0

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def poll(self, here: Collection[Process], now_ns: int) -> None:
        """Read new reports. *here*: the processes of the run on this node."""
        for process in self._fresh:
            process.forget_news()
        self._now_ns = now_ns
        if any(each.new.steps for each in here):
            self._moved_ns = now_ns
        fresh: dict[RemoteHost, _Node] = {}
        written = None if self._history is None else self._history.positions(self.key)
        for name, report in self._server.take():
            if (sender := self._take(name, report)) is not None:
                fresh |= dict.fromkeys(sender.feed(report, now_ns, written), sender)
        for host, node in list(fresh.items()):
            if not self._is_of_run(host, now_ns):
                del fresh[host]
                node.drop(host)
        self._fresh = [each.process for each in fresh]
        for node in self._nodes.values():
            is_left_out = self._is_left_out(node)
            is_silent = now_ns - node.heard_ns > _SILENT_NS
            for host in node.hosts.values():
                host.process.is_left_out = is_left_out
                host.heard_ns = node.heard_ns
                host.silent_since_ns = node.heard_ns if is_silent else 0

    @errors.contained(default=None)
    def _take(self, name: str, report: Any) -> _Node | None:
        """Read a report, except for its processes. Returns the node that sent it; None if it is
        unusable."""
        if not report.HasField("clock_offset_ns"):
            return None
        node = self._nodes.get(name)
        if node is None:
            node = self._nodes[name] = _Node(name, is_kept=self._history is not None)
        node.hear(report, self._now_ns)
        if self._history is not None and report.readings:
            with contextlib.suppress(Senseless):
                found = unpack_readings(report.readings, name, node.ahead_ns)
                self._history.take_readings(self.key, name, found)
        return node

    @errors.contained(default=False)
    def _is_of_run(self, host: RemoteHost, now_ns: int) -> bool:
        """Let a process read its new records. Returns whether it is of this run and of another
        node."""
        before = host.process.labels
        host.poll(now_ns)
        labels = host.process.labels
        if labels is before:
            return True
        return run_labels(labels) == self.run and dict(labels)["node"] != self._own_node

    def fresh(self) -> Sequence[Process]:
        """The processes of other nodes with new records."""
        return self._fresh

    def sources(self) -> Iterator[Process]:
        """The processes of the other nodes. Threads of the endpoint call this too."""
        for node in list(self._nodes.values()):
            yield from [each.process for each in list(node.hosts.values())]

    def has_all_ends(self) -> bool:
        """Whether all processes of other nodes have ended, and their nodes have become silent."""
        ended = [each.host.silent_since_ns and not each.is_at_work for each in self.sources()]
        return bool(ended) and all(ended)

    def _is_left_out(self, node: _Node) -> bool:
        silent_ns = self._now_ns - node.heard_ns
        return silent_ns > _LEFT_OUT_NS and self._now_ns - self._moved_ns < _MOVED_NS

    def ask_stacks(self, rank: int) -> list[dict[str, Any]]:
        """Ask a rank for the stack of its training thread. It blocks, so threads of the endpoint
        call it."""
        of_rank = (each for each in self.sources() if each.global_rank == rank and each.is_at_work)
        return [{"rank": rank, "pid": each.reader.pid, **self._ask_stack(each)} for each in of_rank]

    def _ask_stack(self, process: Process) -> dict[str, Any]:
        host, until = process.host, time.monotonic() + _ANSWERED_WITHIN_S
        before_ns = host.evidence(self._now_ns).answered_ns
        while (found := host.evidence(self._now_ns)).answered_ns == before_ns:
            if time.monotonic() > until:
                why = f"the agent of {dict(process.labels).get('node')} has not answered"
                if found.silent_s is not None:
                    why = why_silent(found.kernel)
                return {"why": why, "threads": []}
            host.ask("where", self._now_ns)
            time.sleep(_LOOK_AGAIN_S)
        frames = [each._asdict() for each in found.stack]
        return {"why": "", "threads": [{"name": "the thread that trains", "frames": frames}]}

    def answer(self, judgement: Judgement | None, now_ns: int) -> None:
        """Send questions, requests for lost records, and the judgement to the other nodes."""
        packed = self._new_judgement(judgement, now_ns)
        for name, node in self._nodes.items():
            answer = wire.Answer(lacking=node.lacking)
            node.lacking.clear()
            for host in node.hosts.values():
                # Remove the questions one by one, since threads of the endpoint may add more
                # meanwhile.
                while host.questions:
                    answer.questions.add(process=host.number, asked=host.questions.pop())
            if packed is not None:
                answer.judged = packed.to([each.process.labels for each in node.hosts.values()])
            if answer.questions or answer.judged or answer.lacking:
                self._server.answer(name, answer)

    def _new_judgement(self, judgement: Judgement | None, now_ns: int) -> PackedJudgement | None:
        if judgement is None or not self._nodes:
            return None
        many = len(judgement.report.ranks) > _MANY_RANKS
        if now_ns - self._judged_ns < (_JUDGE_MANY_EVERY_NS if many else _JUDGE_EVERY_NS):
            return None
        self._judged_ns = now_ns
        return PackedJudgement(judgement)

    def describe(self) -> str:
        """A sentence for `status`."""
        others = "and waits for its other nodes"
        if count := len(self._nodes):
            others = f"with {count} other node{plural(self._nodes)}"
        sentences = [f"this agent leads the run, {others}: {self._server.state}"]
        silent = {
            name: self._now_ns - node.heard_ns
            for name, node in self._nodes.items()
            if self._now_ns - node.heard_ns > _SILENT_NS
            and any(each.process.is_at_work for each in node.hosts.values())
        }
        if silent:
            names = first_of(sorted(silent), _MOST_NAMED)
            sentences.append(f"{names} not heard for {duration(max(silent.values()) / 1e9)}")
        if lost := sum(node.lost for node in self._nodes.values()):
            sentences.append(f"{lost} records of other nodes were overwritten before they came")
        if refused := self._server.refused.copy():
            reasons = ", ".join(f"{why} ({count})" for why, count in refused.items())
            sentences.append(f"refused links of other nodes: {reasons}")
        return "; ".join(sentences)
