"""A run that the agent of another node leads: tells that agent of the processes here."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from otel_ddp import errors
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.runs import pack, said
from otel_ddp.agent.link.runs.process_report import ProcessReport
from otel_ddp.agent.verdicts.judgement import Judgement
from otel_ddp.agent.verdicts.source import Source
from otel_ddp.diagnosis.stall.evidence import Question
from otel_ddp.diagnosis.verdict import Labels

if TYPE_CHECKING:
    from otel_ddp.agent.link.follower import Follower

_REPORT_EVERY_NS = 1_000_000_000
# A lead that has said nothing for so long leads no more.
_SILENT_NS = 10_000_000_000
_KINDS: dict[int, Question] = {
    wire.Question.WHERE: "where",
    wire.Question.WHAT: "what",
    wire.Question.WHEN: "when",
}


class Following:
    """One a run. Called from the agent's loop alone."""

    def __init__(self, run: Labels, follower: Follower, origin_ns: int) -> None:
        """*origin_ns*: when the monotonic clock was 0."""
        self._run = run
        self._follower = follower
        self._origin_ns = origin_ns
        self._processes: dict[Source, ProcessReport] = {}
        self._numbers = 0
        self._report_at_ns = 0
        self._resets = 0
        self._dropped_steps = 0
        self._said: Judgement | None = None
        self._said_ns = self._now_ns = 0

    def start(self) -> None:
        self._follower.start()

    def stop(self) -> None:
        self._follower.stop()

    def poll(self, here: Collection[Source], now_ns: int) -> None:
        """Gather what is new, and report it where that is due. *here*: the run's processes here."""
        self._now_ns = now_ns
        self._keep(here)
        for process in self._processes.values():
            process.gather(now_ns)
        for answer in self._follower.take():
            self._heed(answer, now_ns)
        urgent = any(each.is_urgent for each in self._processes.values())
        if (urgent or now_ns >= self._report_at_ns) and self._follower.clock_offset_ns is not None:
            self._report_at_ns = now_ns + _REPORT_EVERY_NS
            self._report(now_ns)

    def _keep(self, here: Collection[Source]) -> None:
        # What ended is told for a while longer than it has a journal.
        over = [
            source
            for source, each in self._processes.items()
            if source not in here and (not each.has_ended or each.is_over(self._now_ns))
        ]
        for source in over:
            self._dropped_steps += self._processes.pop(source).dropped_steps
        for source in here:
            if source not in self._processes:
                self._numbers += 1
                self._processes[source] = ProcessReport(self._numbers, source)

    @errors.contained()
    def _report(self, now_ns: int) -> None:
        if self._follower.resets != self._resets:
            self._resets = self._follower.resets
            for process in self._processes.values():
                process.tell_all_again()
        report, steps = wire.Report(), 0
        for process in self._processes.values():
            steps += process.write(report.processes.add(), now_ns, self._origin_ns)
        self._follower.send(report, steps=steps)

    @errors.contained()
    def _heed(self, answer: Any, now_ns: int) -> None:
        by_number = {each.number: each for each in self._processes.values()}
        for question in answer.questions:
            process, kind = by_number.get(question.process), _KINDS.get(question.kind)
            if process is not None and kind is not None:
                process.ask(kind, now_ns)
        if answer.judged:
            own = [source.labels for source in self._processes]
            try:
                self._said = said.unpack(answer.judged, self._run, own)
                self._said_ns = now_ns
            except pack.Senseless as what:
                errors.warn_once("led", "an answer of %s makes no sense: %s", answer.node, what)

    def judgement(self) -> Judgement | None:
        """What the lead says of the run; None where it does not lead now."""
        return None if self._now_ns - self._said_ns > _SILENT_NS else self._said

    def sources(self) -> Iterator[Source]:
        """The lead has them."""
        return iter(())

    def answer(self, judgement: Judgement | None, now_ns: int) -> None:
        # No agent follows this one.
        return

    def describe(self) -> str:
        """For `status`."""
        state, led = self._follower.state, self.judgement()
        if led is not None:
            sentence = f"is judged by the agent of {led.by}: {state}"
        else:
            sentence = f"is judged here, by the ranks of this node alone: {state}"
        dropped = self._dropped_steps + self._follower.dropped_steps
        dropped += sum(each.dropped_steps for each in self._processes.values())
        return f"{sentence}; {dropped} steps were dropped" if dropped else sentence
