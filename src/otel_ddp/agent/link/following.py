"""Reports the processes of this node to the agent of another node, which leads their run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from otel_ddp import errors
from otel_ddp.agent.history.kept_run import Sample
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.messages import (
    Senseless,
    pack_readings,
    told_of,
    unpack,
    wall_origin_ns,
)
from otel_ddp.agent.reading.process import Process
from otel_ddp.agent.verdicts.reports import Judgement
from otel_ddp.diagnosis.stall.evidence import Question
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.history.terminal import where_to_look
from otel_ddp.journal.sent import SentJournal
from otel_ddp.vocabulary.words import state_word

if TYPE_CHECKING:
    from otel_ddp.agent.link.client import LinkClient

_S = 1_000_000_000
_REPORT_EVERY_NS = _S
# A lead takes in what so many ranks report in half a second of its core. Of a larger run each
# reports less often, and more steps at once, but no less often than every so many seconds.
_RANKS_A_SECOND, _SELDOM = 4096, 3
# After so long without an answer of the lead this agent judges its own ranks.
_LEADS_NO_MORE_NS = 10_000_000_000
# Evidence on an end may still come: so many reports tell of it.
_END_REPORTS = 30
# The most bytes of records, of all rings together, that one round sends: 20,000 steps.
_MOST_OF_RINGS = 2 << 20
# A report that is larger is sent, and the next one continues.
_LARGE_REPORT = 1 << 20
# The most ended processes whose journals stay in memory until a lead has them.
_MOST_GONE = 32

History = Callable[[str], Sequence[Sample]]
"""What is new of this node for the history that the agent of another node, the lead's, writes."""

# For this long after a question, reports include the kernel's evidence on the process.
_ASKED_NS = 30_000_000_000
# Of one answer: a correct lead asks less, and the rest is left out.
_MOST_AT_ONCE = 256


class Outflow:
    """The records, totals and facts of one process that the lead lacks."""

    def __init__(self, number: int, process: Process, *, is_kept: bool) -> None:
        """*number*: its own, as long as this agent lives. *is_kept*: the lead writes its history,
        and so needs all that was read here."""
        self.number, self.process = number, process
        self._is_kept = is_kept
        self.journal = SentJournal(process.reader, process.mark_before)
        self._asked_ns = 0
        self.end_reports = 0
        """How many reports have contained its end."""
        self.questions: dict[Question, None] = {}
        """Asked after the next report, because asking voids the answer to the last question."""
        self._cause: Mapping[str, Any] = {}

    @errors.contained()
    def write(self, message: wire.Process, now_ns: int, most: int) -> None:
        """All that is new since the last call; *most*: within so many bytes of the ring."""
        journal, process = self.journal, self.process
        journal.sends_values = self._is_kept and process.exported
        message.id, message.journal = self.number, process.reader.name
        message.head = journal.head()
        message.definitions.MergeFrom(wire.Stretch(**journal.definitions()._asdict()))
        message.records.MergeFrom(wire.Stretch(**journal.records(most)._asdict()))
        message.lost = journal.lost
        message.progress, message.totals = journal.progress(), journal.totals()
        asked = bool(self._asked_ns) and now_ns - self._asked_ns < _ASKED_NS
        known = told_of(process, now_ns, process.host.evidence(now_ns) if asked else None)
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
            # The kernel reveals more over time, and then nothing any more: keep the longest answer.
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
    """One a run. Called from the agent's loop alone."""

    def __init__(
        self, run: Labels, client: LinkClient, origin_ns: int, history: History | None
    ) -> None:
        """*origin_ns*: the zero of the monotonic clock, on the clock of `poll`. *history*: None if
        the lead writes the history of its own node alone."""
        self._run = run
        self._history = history
        self._client = client
        self._origin_ns = origin_ns
        self._processes: dict[Process, Outflow] = {}
        self._numbers = 0
        self._report_at_ns = 0
        self._said: Judgement | None = None
        self._said_ns = self._now_ns = 0
        # The lead's clock less ours, in whole seconds: a verdict is known again by its time.
        self._ahead_ns = 0

    def start(self) -> None:
        self._client.start()

    def take_over(self, before: Following) -> None:
        """Adopt the processes of the previous attempt: the next lead requests missing records."""
        self._processes, before._processes = before._processes, {}
        self._numbers = before._numbers
        for each in self._processes.values():
            each.end_reports = 0

    def stop(self) -> None:
        """Report what was read last, and close the link."""
        if self._processes and self._client.is_connected:
            self._report(self._now_ns - self._origin_ns)
        self._client.stop()
        for each in self._processes.values():
            each.journal.close()

    def poll(self, here: Collection[Process], now_ns: int) -> None:
        """Gather what is new, and report it where that is due. *here*: the run's processes here."""
        self._now_ns = now_ns
        self._keep(here)
        offset_ns = self._client.clock_offset_ns
        if offset_ns is not None:
            ahead_ns = offset_ns - wall_origin_ns()
            if abs(ahead_ns - self._ahead_ns) > _S:
                self._ahead_ns = round(ahead_ns / _S) * _S
        for answer in self._client.take():
            self._heed(answer)
        # Records that are not sent stay in the rings.
        if not self._client.is_connected or self._client.clock_offset_ns is None:
            return
        if now_ns >= self._report_at_ns:
            world = max((each.state().own_world_size or 1 for each in here), default=1)
            every = min(-(-world // _RANKS_A_SECOND), _SELDOM)
            self._report_at_ns = now_ns + every * _REPORT_EVERY_NS
            self._report(now_ns - self._origin_ns)

    def _keep(self, here: Collection[Process]) -> None:
        # An ended process is reported for a while after its journal is deleted.
        gone = [source for source in self._processes if source not in here]
        for source in gone:
            each = self._processes[source]
            is_told = source.is_at_work or each.end_reports > _END_REPORTS
            if is_told or source in gone[:-_MOST_GONE]:
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
    def _heed(self, answer: Any) -> None:
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
                self._said = unpack(answer.judged, self._run, own, self._ahead_ns)
                self._said_ns = self._now_ns
            except Senseless as what:
                errors.warn_once("led", "an answer of %s makes no sense: %s", answer.node, what)

    def judgement(self) -> Judgement | None:
        """What the lead says of the run; None where it does not lead now."""
        return None if self._now_ns - self._said_ns > _LEADS_NO_MORE_NS else self._said

    def describe(self) -> str:
        """For `status`."""
        state, led = self._client.state, self.judgement()
        if led is not None:
            sentence = f"the run is judged by the agent of {led.by}: {state}"
        else:
            sentence = f"the run is judged here, by the ranks of this node alone: {state}"
        return "; ".join(filter(None, (sentence, where_to_look("" if led is None else led.by))))
