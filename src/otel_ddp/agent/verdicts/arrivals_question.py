"""Asks the ranks of a run when they arrived at collectives, to find late ranks by that."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.reading.steps import Step
from otel_ddp.agent.verdicts.arrivals_answer import (
    NO_ANSWER_PAUSE_S,
    ArrivalsAnswer,
    parse_answer,
)
from otel_ddp.agent.verdicts.stack_question import StackQuestion
from otel_ddp.diagnosis.arrivals import Sample, TimedStep, compare
from otel_ddp.diagnosis.device_waits import compare_on_device
from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.step_facts import StepFacts, batches_of, facts_of
from otel_ddp.diagnosis.straggler.detector import Hint, Stragglers
from otel_ddp.diagnosis.straggler.report import Report
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict

# The process itself limits how much of the time its answers may stop the training.
_SHORTEST_PAUSE_NS = 5_000_000_000
_MARGIN = 1.1
# Ranks are asked when there are as many new steps as one sample has, or as a ring holds where that
# is fewer; and after this long.
_NEW_STEPS = 60
_LONGEST_WAIT_NS = 30_000_000_000
_ANSWER_NS = 10_000_000_000
# While all arrive together, the pause doubles each time, up to so often.
_MOST_DOUBLINGS = 3
_BALANCED = 0.025
# A comparison that is older than this says nothing any more.
_STALE_NS = 20 * 60 * 1_000_000_000
_STEPS_KEPT = 300
_NOT_YET = "the ranks have not been asked yet when they arrive at their collectives"
_SPEED = ("straggler", "imbalance")


class _Rank:
    """One rank that can be asked."""

    def __init__(self, journal: JournalFeed) -> None:
        reader = journal.reader
        self.journal = journal
        self.question = StackQuestion(reader.path, journal.pid, reader.start_ticks)
        # From the journal's clock to the monotonic clock, which all processes of a host share.
        self.shift_ns = reader.created_monotonic_ns - reader.created_ns
        self.steps: deque[Step] = deque(maxlen=_STEPS_KEPT)
        # The same by the clock of its device.
        self.on_device: deque[StepFacts] = deque(maxlen=_STEPS_KEPT)
        # How many steps it has made since it was last asked.
        self.new_steps = 0
        # How many new steps are worth a question.
        self.wanted_steps = _NEW_STEPS
        self.answer: ArrivalsAnswer | None = None

    def take(self, answer: ArrivalsAnswer) -> None:
        """What it has answered."""
        self.answer = answer
        arrivals = answer.sample.arrivals if answer.sample else ()
        if arrivals:
            since_ns = arrivals[0].at_ns - self.shift_ns
            held = sum(step.began_ns >= since_ns for step in self.steps)
            # Where all steps are remembered, the ring is not full yet.
            self.wanted_steps = min(held, _NEW_STEPS) if held < len(self.steps) - 1 else _NEW_STEPS

    def timed_steps(self) -> list[TimedStep]:
        """The last steps whose parts are all known."""
        whole = [
            step
            for step in self.steps
            if step.number is not None and step.took_ns > 0 and not step.rest
        ]
        facts = [each for batch in batches_of(whole) for each in facts_of(batch)]
        return [
            TimedStep(each, step.began_ns + self.shift_ns, step.parts.codes, step.parts.spans_ns)
            for each, step in zip(facts, whole, strict=True)
        ]


class Arrivals:
    """The ranks of one run on this node, where journals do not tell waits from work."""

    def __init__(self, hint: Hint | None = None) -> None:
        self._hint = hint
        self._stragglers = Stragglers(hint=self._with_source, every_step=False)
        self._ranks: dict[Labels, _Rank] = {}
        self._waits_unknown: set[Labels] = set()
        self._why = _NOT_YET
        self._asked_ns: int | None = None
        self._last_ask_ns: int | None = None
        self._next_ns = 0
        self._compared_ns: int | None = None
        self._last_step = -1
        self._doublings = 0
        self._report: Report | None = None

    @property
    def wanted(self) -> bool:
        """Whether arrivals are needed to find late ranks, and there are ranks to compare."""
        return bool(self._waits_unknown) and len(self._ranks) > 1

    def set_world_size(self, ranks: int) -> None:
        """How many ranks the whole job has, on all its nodes."""
        self._stragglers.set_world_size(ranks)

    def set_waits_known(self, labels: Labels, known: bool) -> None:
        """Whether the journal of this rank tells waits for other ranks from work."""
        (self._waits_unknown.discard if known else self._waits_unknown.add)(labels)

    def feed(self, labels: Labels, journal: JournalFeed, steps: Sequence[Step]) -> None:
        """More steps of a rank, as in its journal."""
        rank = self._ranks.get(labels)
        if rank is None or rank.journal is not journal:
            rank = self._ranks[labels] = _Rank(journal)
        rank.steps.extend(steps)
        rank.new_steps += len(steps)

    def feed_device(self, labels: Labels, steps: Sequence[StepFacts]) -> None:
        """More steps of a rank that was fed, by the clock of its device."""
        self._ranks[labels].on_device.extend(steps)

    def forget(self, labels: Labels) -> None:
        """The process has ended."""
        self._ranks.pop(labels, None)
        self._waits_unknown.discard(labels)
        self._stragglers.forget(labels)
        self._report = None
        # The next process with these labels may count its steps anew.
        self._last_step = -1

    def _with_source(
        self, labels: Labels, phase: str, evidence: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, Any]]:
        advice, more = self._hint(labels, phase, evidence) if self._hint else ("", {})
        return advice, {**more, "told_by": "arrivals at collectives"}

    # -- asking

    def poll(self, now_ns: int, quiet: bool) -> list[Change]:
        """What has changed. *quiet*: no rank is asked anything else at the moment."""
        if not self.wanted:
            self._start_again()
        elif self._asked_ns is not None:
            self._read_answers(now_ns)
        # At once: the sooner they are asked, the less there is to write down, and the sooner it is
        # known what an answer costs.
        elif quiet and now_ns >= self._next_ns and self._has_enough(now_ns):
            self._ask(now_ns)
        if self._compared_ns is not None and now_ns - self._compared_ns > _STALE_NS:
            self._start_again()
        changes = self._stragglers.poll()
        return [each for each in changes if each.verdict.kind in _SPEED]

    def present(self) -> list[Verdict]:
        """The open verdicts with the figures of the last comparison."""
        return [each for each in self._stragglers.present() if each.kind in _SPEED]

    def _has_enough(self, now_ns: int) -> bool:
        """Whether the next answers are worth what they cost."""
        if self._last_ask_ns is None or now_ns - self._last_ask_ns >= _LONGEST_WAIT_NS:
            return True
        return all(each.new_steps >= each.wanted_steps for each in self._ranks.values())

    def _ask(self, now_ns: int) -> None:
        self._asked_ns = self._last_ask_ns = now_ns
        for rank in self._ranks.values():
            rank.new_steps = 0
        for rank in self._ranks.values():
            rank.answer = None
            # All at one moment: then training stops once, and not once for each rank.
            if not rank.question.ask("when", now_ns):
                rank.answer = ArrivalsAnswer(NO_ANSWER_PAUSE_S)
                self._why = "a process cannot be asked when it arrived at its collectives"

    def _read_answers(self, now_ns: int) -> None:
        assert self._asked_ns is not None
        for rank in self._ranks.values():
            if rank.answer is None and rank.question.poll(now_ns).silent_s is None:
                rank.take(parse_answer(rank.question.answer))
        answers = {labels: rank.answer for labels, rank in self._ranks.items() if rank.answer}
        pause_s = max((each.in_s for each in answers.values()), default=NO_ANSWER_PAUSE_S)
        samples = {labels: each.sample for labels, each in answers.items() if each.sample}
        if len(samples) == len(self._ranks):
            self._compare(samples, now_ns)
        elif len(answers) < len(self._ranks) and now_ns - self._asked_ns < _ANSWER_NS:
            return
        self._asked_ns = None
        pause_ns = max(_SHORTEST_PAUSE_NS, int(_MARGIN * pause_s * 1e9))
        self._next_ns = now_ns + pause_ns * (1 << self._doublings)

    def _compare(self, samples: Mapping[Labels, Sample], now_ns: int) -> None:
        steps = {labels: rank.timed_steps() for labels, rank in self._ranks.items()}
        if any(sample.on_device for sample in samples.values()):
            timed = {labels: rank.on_device for labels, rank in self._ranks.items()}
            facts, self._why = compare_on_device(samples, steps, timed, self._last_step)
        else:
            facts, self._why = compare(samples, steps, self._last_step)
        if not facts:
            return
        self._last_step = max(each[-1].number for each in facts.values())
        spans_s = [sum(step.took_ns for step in each) / 1e9 for each in facts.values()]
        since_s = 0.0 if self._compared_ns is None else (now_ns - self._compared_ns) / 1e9
        self._compared_ns = now_ns
        # Time is lost in the steps between two samples as well.
        self._stragglers.set_steps_each(max(since_s / min(spans_s), 1.0))
        for labels in facts:
            # All are known before the first step: a rank that comes later begins a new comparison.
            self._stragglers.feed(labels, [])
        for labels, each in facts.items():
            self._stragglers.feed(labels, each)
        self._report = self._stragglers.report()
        self._doublings = (
            min(self._doublings + 1, _MOST_DOUBLINGS)
            if not self._report.insufficient and _balanced(facts)
            else 0
        )

    def _start_again(self) -> None:
        """Forget the comparison: it is out of date."""
        if self._compared_ns is not None:
            for labels in self._ranks:
                self._stragglers.forget(labels)
            self._compared_ns, self._report, self._why = None, None, _NOT_YET
            self._last_step = -1
        self._asked_ns, self._last_ask_ns, self._next_ns = None, None, 0
        self._doublings = 0

    # -- the present state

    def report(self) -> Report:
        """The present state, by the last comparison."""
        report = self._report or self._stragglers.report()
        why = report.insufficient
        if why:
            named = ", ".join(
                sorted(dict(labels).get("rank", "?") for labels in self._waits_unknown)
            )
            more = self._why or why.partition(": ")[2]
            why = (
                f"insufficient data: waiting for other ranks cannot be told from work on rank "
                f"{named}; {more}"
            )
        return report._replace(insufficient=why)


def _balanced(facts: Mapping[Labels, Sequence[StepFacts]]) -> bool:
    """Whether no rank of this sample is late by as much as an open verdict needs to stay."""
    work = [median([each.work_ns for each in steps]) for steps in facts.values()]
    took = [median([each.took_ns for each in steps]) for steps in facts.values()]
    return max(work) - median(work) < _BALANCED * median(took)
