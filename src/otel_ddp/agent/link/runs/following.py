"""A run that the agent of another node leads: tells that agent of the processes here."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from otel_ddp import errors
from otel_ddp.agent.history.kept_run import Readings
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.runs import readings, said
from otel_ddp.agent.link.runs.known import Senseless, wall_origin_ns
from otel_ddp.agent.link.runs.outflow import Outflow
from otel_ddp.agent.link.runs.stacks import StacksHere
from otel_ddp.agent.reading.process import Process
from otel_ddp.agent.verdicts.reports import Judgement
from otel_ddp.diagnosis.stall.evidence import Question
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.history.terminal import where_to_look

if TYPE_CHECKING:
    from otel_ddp.agent.link.client import LinkClient

_S = 1_000_000_000
_REPORT_EVERY_NS = _S
# A lead takes in what so many ranks report in half a second of its core. Of a larger run each
# reports less often, and more steps at once, but no less often than every so many seconds.
_RANKS_A_SECOND, _SELDOM = 4096, 3
# A lead that has said nothing for so long leads no more.
_LEADS_NO_MORE_NS = 10_000_000_000

# More is known of an end for so long after it.
_ENDED_NS = 30_000_000_000
# Within so many bytes of all rings together records are sent in one round: 20,000 steps.
_MOST_OF_RINGS = 2 << 20
# One that has more is sent, and another one goes on.
_LARGE_REPORT = 1 << 20
# Of processes that are gone, whose journals stay in memory until a lead has them.
_MOST_GONE = 32

QUESTIONS: Mapping[int, Question] = {
    wire.Question.WHERE: "where",
    wire.Question.WHAT: "what",
}

History = Callable[[str], Readings]
"""What is new of this node for the history that the agent of another node, the lead's, writes."""


class Following:
    """One a run. Called from the agent's loop alone."""

    def __init__(
        self, run: Labels, client: LinkClient, origin_ns: int, history: History | None
    ) -> None:
        """*origin_ns*: when the monotonic clock was 0, by that of `poll`. *history*: None: the lead
        writes that of its own node alone."""
        self._run = run
        self._history = history
        self._stacks = StacksHere()
        self._client = client
        self._origin_ns = origin_ns
        self._processes: dict[Process, Outflow] = {}
        self._numbers = 0
        self._report_at_ns = 0
        self._said: Judgement | None = None
        self._said_ns = self._now_ns = 0
        # When the lead was out of reach last.
        self._unlinked_ns = 0
        # The lead's clock less ours, in whole seconds: a verdict is known again by its time.
        self._ahead_ns = 0

    def start(self) -> None:
        self._client.start()

    def take_over(self, before: Following) -> None:
        """Go on with the processes of the last attempt: the next lead asks for what it lacks."""
        self._processes, before._processes = before._processes, {}
        self._numbers, self._unlinked_ns = before._numbers, before._now_ns

    def stop(self) -> None:
        """Report what was read last, and close the link."""
        if self._processes and self._client.is_connected:
            self._report(self._now_ns - self._origin_ns)
        self._client.stop()
        for each in self._processes.values():
            each.close()

    def poll(self, here: Collection[Process], now_ns: int) -> None:
        """Gather what is new, and report it where that is due. *here*: the run's processes here."""
        self._now_ns = now_ns
        self._keep(here)
        outflows = self._processes.values()
        for each in outflows:
            each.look(now_ns - self._origin_ns)
        offset_ns = self._client.clock_offset_ns
        if offset_ns is not None:
            ahead_ns = offset_ns - wall_origin_ns()
            if abs(ahead_ns - self._ahead_ns) > _S:
                self._ahead_ns = round(ahead_ns / _S) * _S
        for answer in self._client.take():
            self._heed(answer, now_ns - self._origin_ns)
        urgent = self._stacks.poll() or any(each.is_urgent for each in outflows)
        # Records that are not sent stay in the rings.
        if not self._client.is_connected or self._client.clock_offset_ns is None:
            return
        if urgent or now_ns >= self._report_at_ns:
            world = max((each.state().own_world_size or 1 for each in here), default=1)
            every = min(-(-world // _RANKS_A_SECOND), _SELDOM)
            self._report_at_ns = now_ns + every * _REPORT_EVERY_NS
            self._report(now_ns - self._origin_ns)

    def _keep(self, here: Collection[Process]) -> None:
        # What ended is told for a while longer than it has a journal, while the lead is heard.
        if not self._client.is_connected:
            self._unlinked_ns = self._now_ns
        gone = [source for source in self._processes if source not in here]
        over = gone[:-_MOST_GONE]
        for source in gone if self._client.is_connected else ():
            each = self._processes[source]
            told_since_ns = max(each.ended_at_ns + self._origin_ns, self._unlinked_ns)
            if not each.has_ended or self._now_ns - told_since_ns > _ENDED_NS:
                over.append(source)
        for source in dict.fromkeys(over):
            self._processes.pop(source).close()
        for source in here:
            if source not in self._processes:
                self._numbers += 1
                kept = self._history is not None
                self._processes[source] = Outflow(self._numbers, source, is_kept=kept)

    @errors.contained()
    def _report(self, now_ns: int) -> None:
        report = wire.Report(told=self._stacks.take())
        if self._history is not None and (led := self.judgement()) is not None:
            report.readings = readings.pack(self._history(led.by))
        most = _MOST_OF_RINGS // max(len(self._processes), 8)
        for process in self._processes.values():
            if report.ByteSize() > _LARGE_REPORT:
                report.goes_on = True
                self._send(report)
                report = wire.Report()
            process.write(report.processes.add(), now_ns, most)
        self._send(report)

    def _send(self, report: Any) -> None:
        report.clock_uncertainty_ns = self._client.clock_uncertainty_ns
        self._client.send(report)

    @errors.contained()
    def _heed(self, answer: Any, now_ns: int) -> None:
        by_number = {each.number: (source, each) for source, each in self._processes.items()}
        for question in answer.questions:
            source, process = by_number.get(question.process, (None, None))
            if source is None or process is None:
                continue
            if question.kind == wire.Question.STACKS:
                self._stacks.ask(question.number, source.reader.path)
            elif (asked := QUESTIONS.get(question.kind)) is not None:
                process.ask(asked, now_ns)
        for lacking in answer.lacking:
            _, process = by_number.get(lacking.process, (None, None))
            if process is not None:
                position = lacking.position if lacking.HasField("position") else None
                process.go_back(lacking.defined, position)
        if answer.judged:
            own = [source.labels for source in self._processes]
            try:
                self._said = said.unpack(answer.judged, self._run, own, self._said, self._ahead_ns)
                self._said_ns = self._now_ns
            except Senseless as what:
                errors.warn_once("led", "an answer of %s makes no sense: %s", answer.node, what)

    def judgement(self) -> Judgement | None:
        """What the lead says of the run; None where it does not lead now."""
        return None if self._now_ns - self._said_ns > _LEADS_NO_MORE_NS else self._said

    def sources(self) -> Iterator[Process]:
        """The lead has them."""
        return iter(())

    def fresh(self) -> Sequence[Process]:
        """The lead has them."""
        return ()

    def ask_stacks(self, rank: int) -> list[dict[str, Any]]:
        """They are asked for on the lead's node."""
        return []

    def answer(self, judgement: Judgement | None, now_ns: int) -> None:
        # No agent follows this one.
        return

    def describe(self) -> str:
        """For `status`."""
        state, led = self._client.state, self.judgement()
        if led is not None:
            sentence = f"the run is judged by the agent of {led.by}: {state}"
        else:
            sentence = f"the run is judged here, by the ranks of this node alone: {state}"
        refused = self._client.refused_questions
        parts = (
            sentence,
            where_to_look("" if led is None else led.by),
            f"{refused} questions of the lead were refused" if refused else "",
        )
        return "; ".join(filter(None, parts))
