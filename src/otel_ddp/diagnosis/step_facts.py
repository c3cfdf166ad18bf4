"""Turns steps from a journal into the facts that detectors of speed compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any, NamedTuple

from otel_ddp.diagnosis.steps import Calls, Step
from otel_ddp.vocabulary.words import (
    PHASE_CODE,
    PHASES,
    UNMEASURED,
    UNUSUAL_PHASES,
    WORK_PHASES,
    phase_word,
)

_NOTHING: Mapping[str, int] = {}
# Python's small garbage collections take less than this, and happen in nearly every step.
_SMALL_GC_S = 0.0005
_LONG_GC_S = 0.005
_GC_SHARE = 0.01


class StepFacts(NamedTuple):
    """One step of one rank. Times stay in the journal's nanoseconds: no conversion per step."""

    number: int
    ended_ns: int
    took_ns: int
    wait_ns: int
    """All waiting for other ranks, whatever the wait is for."""
    phases_ns: tuple[int, ...]
    """Time in each of WORK_PHASES, without waits for other ranks."""
    unusual_ns: Mapping[str, int]
    """Time in each of UNUSUAL_PHASES that the step had, by word."""
    unusual: bool
    """It compiled, saved, evaluated, was profiled or skipped, or collected much garbage."""
    work: int
    """Tokens, or samples where tokens are not known; 0 where neither is."""
    paced_ns: tuple[int, ...] | None = None
    """On the device's clock: for how long the device kept up with the host in each of WORK_PHASES.
    It was idle, or had no more to do than was launched at the moment. None on the host's clock."""
    host_ns: tuple[int, ...] | None = None
    """On the device's clock: the same phases by the host's."""
    behind_ns: int | None = None
    """By how much the device was behind its host when the step began there; None: not known."""
    garbage_ns: int = 0
    """Long collections of garbage, where nothing else was unusual."""
    measured: bool = True
    """Otherwise its phases and waits are not known, but for unusual ones."""
    calls: Calls | None = None
    """None where they are not noted."""


def columns_of(steps: Sequence[StepFacts]) -> Any:
    """The same fields, each with the values of all these steps: cheaper than one by one."""
    return StepFacts(*zip(*steps, strict=True))  # type: ignore[arg-type]


class StepBatch(NamedTuple):
    """Consecutive steps that have the same parts, so that columns can be summed at once."""

    codes: bytes
    """The phase code of each part, then of each rest."""
    spans_ns: Sequence[Sequence[int]]
    """For each part, then for each rest: the time that every step spent in it."""
    steps: Sequence[Step]

    def longest_ns(self) -> dict[int, int]:
        """The longest stretch of each phase, by phase code."""
        found: dict[int, int] = {}
        # A rest sums up many stretches; their single lengths are not known.
        parts = len(self.steps[0].parts.codes)
        for code, span_ns in zip(self.codes[:parts], map(max, self.spans_ns), strict=False):
            phase = code & PHASE_CODE
            if span_ns > found.get(phase, 0):
                found[phase] = span_ns
        return found


# The agent runs this for every step of every rank, so it works in columns, which is cheaper.


def batches_of(steps: Sequence[Step]) -> list[StepBatch]:
    """The steps in batches: nearly all steps of one training have the same parts."""
    parts = [step.parts for step in steps]
    kinds = [each.codes for each in parts]
    rows = [each.spans_ns for each in parts]
    for at in [at for at, step in enumerate(steps) if step.rest]:
        rest = steps[at].rest
        kinds[at] += bytes([code for code, _ in rest])
        rows[at] = (*rows[at], *[span_ns for _, span_ns in rest])
    found = []
    first = 0
    for codes, same in groupby(kinds):
        end = first + len(list(same))
        found.append(StepBatch(codes, list(zip(*rows[first:end], strict=True)), steps[first:end]))
        first = end
    return found


@lru_cache(256)
def _indices(codes: bytes) -> dict[str, list[int]]:
    """For steps with these parts: the indices to add up for each phase."""
    indices: dict[str, list[int]] = {}
    for at, code in enumerate(codes):
        indices.setdefault(phase_word(code & PHASE_CODE), []).append(at)
    return indices


def _spent_ns(batch: StepBatch, phase: str) -> Sequence[int]:
    """How long each step was in this phase."""
    indices = _indices(batch.codes).get(phase)
    if not indices:
        return [0] * len(batch.steps)
    if len(indices) == 1:
        return batch.spans_ns[indices[0]]
    return list(map(sum, zip(*[batch.spans_ns[at] for at in indices], strict=True)))


def _unusual_ns(batch: StepBatch) -> list[Mapping[str, int]]:
    """What each step had that ordinary steps do not have."""
    words = [word for word in UNUSUAL_PHASES if word in _indices(batch.codes)]
    if not words:
        return [_NOTHING] * len(batch.steps)
    columns = zip(*[_spent_ns(batch, word) for word in words], strict=True)
    return [dict(zip(words, spent_ns, strict=True)) for spent_ns in columns]


def facts_of(batch: StepBatch) -> list[StepFacts]:
    """The facts of each step, but for those without a number or a duration."""
    found = []
    measured = UNMEASURED not in batch.codes
    for step, wait_ns, phases_ns, unusual_ns in zip(
        batch.steps,
        _spent_ns(batch, "comm_wait"),
        zip(*[_spent_ns(batch, word) for word in WORK_PHASES], strict=True),
        _unusual_ns(batch),
        strict=True,
    ):
        number, ended_ns, gc_s = step.number, step.ended_ns, step.gc_s
        took_ns = ended_ns - step.began_ns
        if number is None or took_ns <= 0:
            continue
        unusual = bool(unusual_ns) or step.skipped or step.profiled
        collects = gc_s > _SMALL_GC_S and gc_s > min(_GC_SHARE * took_ns / 1e9, _LONG_GC_S)
        garbage_ns = round(gc_s * 1e9) if collects and not unusual else 0
        on_host = number, ended_ns, took_ns, wait_ns, phases_ns, unusual_ns
        of_device = None, None, None
        kind = unusual or collects
        facts = *on_host, kind, step.work, *of_device, garbage_ns, measured, step.calls
        found.append(StepFacts(*facts))
    return found


# -- on the clock of a device: it knows how long each phase took there, and nothing else of a step

# The device is some steps behind the host, and never more than this.
_MOST_WAITING = 1000
# In the journal a phase and a time are one number: the phase is above these bits.
_PACED_SHIFT = 48
_PACED_NS = (1 << _PACED_SHIFT) - 1
_CODES = [PHASES[word] for word in WORK_PHASES]


class DeviceSteps:
    """One per rank that has such a clock."""

    def __init__(self) -> None:
        # Of steps that the device has not finished, by number.
        self._on_host: dict[int, StepFacts] = {}
        # Of the last step: its number, and by how much the device was behind at its end.
        self._last: tuple[int, int | None] = (-1, None)

    def feed_host(self, steps: Sequence[StepFacts]) -> None:
        """Steps as the host saw them."""
        on_host = self._on_host
        for each in steps:
            on_host[each.number] = each
        while len(on_host) > _MOST_WAITING:
            del on_host[next(iter(on_host))]

    def feed(self, steps: Sequence[Step]) -> list[StepFacts]:
        """Steps as the device saw them; the facts of those that the host has told, too.

        Steps that were not measured stay as the host saw them, between the others.
        """
        by_number = {step.number: step for step in steps}
        found = []
        for facts in [each for batch in batches_of(steps) for each in facts_of(batch)]:
            step = by_number[facts.number]
            (before, behind_ns), self._last = self._last, (facts.number, step.lag_ns)
            found += self._unmeasured_before(facts.number)
            host = self._on_host.pop(facts.number, None)
            if host is None:
                continue
            if not host.measured:
                found.append(host)
                continue
            paced_ns = dict.fromkeys(_CODES, 0)
            for each in step.paced:
                code = each >> _PACED_SHIFT
                if code in paced_ns:
                    paced_ns[code] += each & _PACED_NS
            found.append(
                facts._replace(
                    # The two clocks drift apart, so the host's says when.
                    ended_ns=host.ended_ns + (step.lag_ns or 0),
                    unusual=host.unusual or facts.unusual,
                    work=host.work,
                    paced_ns=tuple(paced_ns.values()),
                    host_ns=host.phases_ns,
                    behind_ns=behind_ns if before == facts.number - 1 else None,
                    garbage_ns=0 if facts.unusual else host.garbage_ns,
                )
            )
        return found

    def _unmeasured_before(self, number: int) -> list[StepFacts]:
        on_host = self._on_host
        found = []
        while on_host and (first := next(iter(on_host))) < number:
            facts = on_host.pop(first)
            if not facts.measured:
                found.append(facts)
        return found
