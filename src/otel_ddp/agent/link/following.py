"""Reports this node's processes to the lead, the agent on another node that judges the run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from otel_ddp import errors
from otel_ddp.agent.history.kept_run import Sample
from otel_ddp.agent.judge.reports import Judgement
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.messages import (
    Senseless,
    node_facts,
    pack_readings,
    unpack_judgement,
    wall_origin_ns,
)
from otel_ddp.agent.reading.process import Process
from otel_ddp.diagnosis.stall.evidence import Question
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.history.terminal import where_to_look
from otel_ddp.journal.sent import SentJournal
from otel_ddp.vocabulary.words import state_word

if TYPE_CHECKING:
    from otel_ddp.agent.link.client import LinkClient

_REPORT_EVERY_NS = 1_000_000_000
# The lead needs half a core to read reports of this many ranks each second. In larger runs, nodes
# report less often, but at least every `_SELDOM` seconds.
_RANKS_A_SECOND, _SELDOM = 4096, 3
# After this long without the lead's judgement, this agent judges its own ranks by itself.
_LEAD_IS_GONE_NS = 10_000_000_000
# How many reports contain the end of a process: evidence about the end may arrive later.
_END_REPORTS = 30
# Limit of bytes that one round sends from the record rings of all processes: 20,000 steps.
_MOST_OF_RINGS = 2 << 20
# A report that has grown larger than this is sent. The next process goes into another report.
_LARGE_REPORT = 1 << 20
# Limit of ended processes whose journals stay open until their ends are reported.
_MOST_GONE = 32

History = Callable[[str], Sequence[Sample]]
"""Takes the name of the lead's node; returns new samples of this node for the lead's history."""

# How long after a question reports contain the process's answer and its kernel state.
_ASKED_NS = 30_000_000_000
# How many questions in one answer of the lead are read. A correct lead sends fewer.
_MOST_AT_ONCE = 256


class Outflow:
    """The messages to the lead about one process: new parts of its journal, and facts about it."""

    def __init__(self, number: int, process: Process, *, is_kept: bool) -> None:
        """*number*: the process's id in messages. *is_kept*: whether the lead writes the history of
        the process. For that, the lead also needs its logged values and events."""
        self.number, self.process = number, process
        self._is_kept = is_kept
        self.journal = SentJournal(process.reader, process.mark_before)
        self._asked_ns = 0
        self.end_reports = 0
        """How many reports have contained the end of the process."""
        self.questions: dict[Question, None] = {}
        """Questions from the lead, asked after the next report, since they void the last answer."""
        self._cause: Mapping[str, Any] = {}

    @errors.contained()
    def write(self, message: wire.Process, now_ns: int, most: int) -> None:
        """Write all data since the last call into *message*. *most*: limit of bytes from the
        journal's ring of records."""
        journal, process = self.journal, self.process
        journal.sends_values = self._is_kept and process.exported
        message.id, message.journal = self.number, process.reader.name
        message.head = journal.head()
        message.definitions.MergeFrom(wire.Stretch(**journal.definitions()._asdict()))
        message.records.MergeFrom(wire.Stretch(**journal.records(most)._asdict()))
        message.lost = journal.lost
        message.progress, message.totals = journal.progress(), journal.totals()
        asked = bool(self._asked_ns) and now_ns - self._asked_ns < _ASKED_NS
        known = node_facts(process, now_ns, process.host.evidence(now_ns) if asked else None)
        if not process.is_at_work:
            origin_ns, life = wall_origin_ns(), process.life
            self.end_reports += 1
            message.reason = journal.reason()
            known["end"] = {
                "state": state_word(life.state),
                "seen_alive_ns": life.seen_alive_ns - origin_ns,
                "gone_ns": life.gone_ns - origin_ns,
                "ended_ns": life.ended_ns - origin_ns,
            }
            # Evidence about the end grows for a while, and is gone once the process is. Keep the
            # longest evidence seen.
            cause = process.host.cause()
            self._cause = cause if len(cause) >= len(self._cause) else self._cause
            known["cause"] = dict(self._cause)
            if present_ns := process.host.present_ns():
                known["present_ns"] = present_ns - origin_ns
        message.known = json.dumps(known).encode()
        for question in self.questions:
            process.host.ask(question, now_ns)
            self._asked_ns = now_ns
        self.questions.clear()


class Following:
    """Follows the lead of one run. Only the agent's loop calls the methods."""

    def __init__(
        self, run: Labels, client: LinkClient, origin_ns: int, history: History | None
    ) -> None:
        """*origin_ns*: the wall-clock time of monotonic time 0, as `poll` uses it. *history*: None
        if each node writes the history of its own ranks."""
        self._run = run
        self._history = history
        self._client = client
        self._origin_ns = origin_ns
        self._processes: dict[Process, Outflow] = {}
        self._numbers = 0
        self._report_at_ns = 0
        self._judgement: Judgement | None = None
        self._judged_ns = self._now_ns = 0

    def start(self) -> None:
        self._client.start()

    def take_over(self, before: Following) -> None:
        """Continue with the processes of the previous link. The lead requests the records it
        lacks."""
        self._processes, before._processes = before._processes, {}
        self._numbers = before._numbers
        for each in self._processes.values():
            each.end_reports = 0

    def stop(self) -> None:
        """Send a last report, and close the link."""
        if self._processes and self._client.is_connected:
            self._report(self._now_ns - self._origin_ns)
        self._client.stop()
        for each in self._processes.values():
            each.journal.close()

    def poll(self, here: Collection[Process], now_ns: int) -> None:
        """Send a report if it is due. *here*: the processes of the run on this node."""
        self._now_ns = now_ns
        self._keep(here)
        for answer in self._client.take():
            self._follow(answer)
        # As long as no report can be sent, new records stay in the rings of the journals.
        if not self._client.is_connected or self._client.clock_offset_ns is None:
            return
        if now_ns >= self._report_at_ns:
            world = max((each.state().own_world_size or 1 for each in here), default=1)
            every = min(-(-world // _RANKS_A_SECOND), _SELDOM)
            self._report_at_ns = now_ns + every * _REPORT_EVERY_NS
            self._report(now_ns - self._origin_ns)

    def _keep(self, here: Collection[Process]) -> None:
        # Keep reporting an ended process for a while after its journal was deleted, since its end
        # may not have arrived, or evidence may follow.
        gone = [source for source in self._processes if source not in here]
        for source in gone:
            each = self._processes[source]
            is_done = source.is_at_work or each.end_reports > _END_REPORTS
            if is_done or source in gone[:-_MOST_GONE]:
                self._processes.pop(source).journal.close()
        for source in here:
            if source not in self._processes:
                self._numbers += 1
                kept = self._history is not None
                self._processes[source] = Outflow(self._numbers, source, is_kept=kept)

    @errors.contained()
    def _report(self, now_ns: int) -> None:
        report = wire.Report()
        if self._history is not None and (led := self.judgement()) is not None:
            report.readings = pack_readings(self._history(led.by))
        most = _MOST_OF_RINGS // max(len(self._processes), 8)
        for process in self._processes.values():
            if report.ByteSize() > _LARGE_REPORT:
                self._client.send(report)
                report = wire.Report()
            process.write(report.processes.add(), now_ns, most)
        self._client.send(report)

    @errors.contained()
    def _follow(self, answer: Any) -> None:
        by_number = {each.number: each for each in self._processes.values()}
        for question in answer.questions[:_MOST_AT_ONCE]:
            process = by_number.get(question.process)
            if process is not None and question.asked in get_args(Question):
                process.questions[question.asked] = None
        for lacking in answer.lacking[:_MOST_AT_ONCE]:
            if (process := by_number.get(lacking.process)) is not None:
                process.journal.go_back(lacking.defined, lacking.position)
        if answer.judged:
            own = [source.labels for source in self._processes]
            try:
                self._judgement = unpack_judgement(answer.judged, self._run, own)
                self._judged_ns = self._now_ns
            except Senseless as why:
                errors.warn_once("led", "an answer of %s makes no sense: %s", answer.node, why)

    def has_all_ends(self) -> bool:
        """Whether the end of each process of this node was reported often enough, so that the lead
        has it."""
        return all(each.end_reports > _END_REPORTS for each in self._processes.values())

    def judgement(self) -> Judgement | None:
        """The lead's latest judgement; None if the lead has sent none for a while."""
        return None if self._now_ns - self._judged_ns > _LEAD_IS_GONE_NS else self._judgement

    def describe(self) -> str:
        """A sentence for `status`."""
        state, led = self._client.state, self.judgement()
        if led is not None:
            sentence = f"the run is judged by the agent of {led.by}: {state}"
        else:
            sentence = f"the run is judged here, by the ranks of this node alone: {state}"
        return "; ".join(filter(None, (sentence, where_to_look("" if led is None else led.by))))
