"""Decides which steps are exported as spans, and makes these spans."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from hashlib import blake2s
from typing import Any

from otel_ddp.agent.ledger import Labels
from otel_ddp.diagnosis.steps import Step
from otel_ddp.journal.layout import OF_BUFFERS, trace_of_step
from otel_ddp.vocabulary.words import PHASES, UNMEASURED, phase_word

SAMPLED_EVERY = 100

_WAIT = PHASES["comm_wait"]

_RECENT = 200
_ENOUGH = 20
# The median and the deviation take a sort each: too slow for every step, and they hardly move.
_UPDATE_EVERY = 10
# A slow step lies four robust standard deviations above the median. If steps vary like a log-normal
# of 15 %, that is 1.6 medians, which one step in 1,000 exceeds (one in 200 if the deviation comes
# from 20 steps only). Never less than 1.25 medians: a very even job is not reported for its last
# per cent. Never as much as two, which is slow in any job.
_DEVIATIONS = 4.0
_NEVER_BELOW, _NEVER_ABOVE = 1.25, 1.9
# In a normal distribution: the standard deviation as a multiple of the median absolute one.
_OF_NORMAL = 1.4826

# Slow steps that get a span: ten at once, then one every three seconds. That is never more than
# thirty a minute, however broken the job is.
_BURST = 10.0
_REFILL_NS = 3_000_000_000

_MOST_CHILDREN = 64


def sampled_every(facts: dict[str, Any]) -> int:
    """This process exports every n-th step as a span; 0: slow steps only."""
    every = facts.get("sample_steps")
    if isinstance(every, int) and not isinstance(every, bool) and every >= 0:
        return every
    return SAMPLED_EVERY


class StepSpans:
    """One a process: knows how long its steps usually take, and limits the spans of slow ones."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=_RECENT)
        self._seen = 0
        self._slow_ns = float("inf")
        self._allowed = _BURST
        self._allowed_at_ns = 0
        self._left_out = 0
        # The next measured step is exported: often not the one whose number is asked for.
        self._sample_is_due = False

    def spans(self, step: Step, labels: Labels, every: int) -> list[dict[str, Any]]:
        """The spans of this step, as contents of documents; mostly none."""
        is_slow, number = self._slow(step.took_ns), step.number
        if number is None:
            return []  # no trace to share with the other ranks
        if every and number % every == 0:
            self._sample_is_due = True
        is_sampled = self._sample_is_due and step.measured
        if is_sampled:
            self._sample_is_due = False
        elif not is_slow:
            return []
        elif not self._allow(step.ended_ns):
            self._left_out += 1
            return []
        why = ["sampled"] * is_sampled + ["slow"] * is_slow
        left_out, self._left_out = self._left_out, 0
        return list(_make_spans(step, number, ",".join(why), left_out, labels))

    def _slow(self, took_ns: int) -> bool:
        slow = took_ns > self._slow_ns
        recent = self._recent
        recent.append(took_ns)
        self._seen += 1
        if len(recent) >= _ENOUGH and self._seen % _UPDATE_EVERY == 0:
            ordered = sorted(recent)
            middle = len(ordered) // 2
            usual = ordered[middle]
            deviation = _OF_NORMAL * sorted([abs(each - usual) for each in ordered])[middle]
            bound = max(usual + _DEVIATIONS * deviation, _NEVER_BELOW * usual)
            self._slow_ns = min(bound, _NEVER_ABOVE * usual)
        return slow

    def _allow(self, now_ns: int) -> bool:
        # By the journal's time, not ours: an agent that starts late reads many steps at once.
        passed_ns = max(0, now_ns - self._allowed_at_ns)
        self._allowed_at_ns = now_ns
        self._allowed = min(_BURST, self._allowed + passed_ns / _REFILL_NS)
        if self._allowed < 1.0:
            return False
        self._allowed -= 1.0
        return True


def _make_spans(
    step: Step, number: int, why: str, left_out: int, labels: Labels
) -> Iterator[dict[str, Any]]:
    by_name = dict(labels)
    # The id depends on the step alone, so that a step that is read twice has the same spans. It
    # includes the beginning: a run that is resumed makes some of its steps a second time.
    owner = f"{by_name.get('run')}/{by_name.get('rank')}/{number}/{step.began_ns}"

    def span(
        index: int, name: str, began_ns: int, ended_ns: int, attributes: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "name": name,
            "id": _span_id(owner, index),
            "parent": _span_id(owner, 0) if index else "",
            "trace": trace_of_step(number),
            "start": began_ns,
            "end": ended_ns,
            "step": number if step.logged is None else step.logged,
            "error": "",
            "attributes": attributes,
        }

    attributes: dict[str, Any] = {"reason": why}
    if step.gc_s > 0:
        attributes["gc_s"] = step.gc_s
    if step.retries:
        attributes["retries"] = step.retries
    if left_out:
        attributes["left_out"] = left_out
    shown = [(at, part) for at, part in enumerate(step.parts.each(), 1) if part.code != UNMEASURED]
    if len(shown) > _MOST_CHILDREN:
        # Only the longest parts: a gap is true, but a part that joins two phases is not. The total
        # time of each phase is then an attribute.
        shown.sort(key=lambda each: each[1].began_ns - each[1].ended_ns)
        shown = sorted(shown[:_MOST_CHILDREN])
        for phase in sorted(step.phases()):
            word = phase_word(phase)
            key = f"{word}_s"
            attributes[key] = attributes.get(key, 0.0) + step.seconds(phase)
        attributes["parts_shown"] = _MOST_CHILDREN
    yield span(0, "step", step.began_ns, step.ended_ns, attributes)
    for index, part in shown:
        sync = "buffers" if part.code & OF_BUFFERS else "gradients"
        more = {"sync": sync} if part.phase == _WAIT else {}
        yield span(index, phase_word(part.phase), part.began_ns, part.ended_ns, more)


def _span_id(owner: str, index: int) -> str:
    return blake2s(f"{owner}/{index}".encode("utf-8", "replace"), digest_size=8).hexdigest()
