"""Turns steps into the facts that the straggler detector and the bounds compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from otel_ddp.diagnosis.steps import Calls, Step
from otel_ddp.vocabulary.words import (
    PHASE_CODE,
    PHASES,
    UNUSUAL_PHASES,
    WORK_PHASES,
    phase_word,
)

_NOTHING: Mapping[str, int] = {}
# A step counts as unusual for its garbage collections if they take more than _SMALL_GC_S (nearly
# every step has shorter ones), and more than either _GC_SHARE of the step or _LONG_GC_S.
_SMALL_GC_S = 0.0005
_LONG_GC_S = 0.005
_GC_SHARE = 0.01


class StepFacts(NamedTuple):
    """One step of one rank."""

    number: int
    ended_ns: int
    took_ns: int
    wait_ns: int
    phases_ns: tuple[int, ...]
    """Time in each of WORK_PHASES. Waits for other ranks are not included."""
    unusual_ns: Mapping[str, int]
    """By phase: the time in each of UNUSUAL_PHASES that the step has."""
    unusual: bool
    """Whether the step has unusual phases or garbage collections, was skipped, or was profiled."""
    work: int
    """The number of tokens; without these the number of samples; 0 if both are unknown."""
    paced_ns: tuple[int, ...] | None = None
    """By phase (of WORK_PHASES): how long the host held the device up, so that it was idle, or had
    only the kernel just launched. None if the step is timed by the host's clock."""
    host_ns: tuple[int, ...] | None = None
    """`phases_ns` by the host's clock, if the device's clock times the step; else None."""
    behind_ns: int | None = None
    """How far the device lagged behind its host when the step began; None if unknown."""
    garbage_ns: int = 0
    """Time in garbage collections, if these alone make the step unusual; else 0."""
    measured: bool = True
    """If False, only the duration and the unusual phases of the step are known."""
    calls: Calls | None = None


def columns_of(steps: Sequence[StepFacts]) -> Any:
    """The steps transposed: a StepFacts whose fields hold the values of all steps."""
    return StepFacts(*zip(*steps, strict=True))  # type: ignore[arg-type]


# Cached, since most steps of a training have the same sequence of phases.
@lru_cache(256)
def _words(codes: bytes) -> tuple[str, ...]:
    return tuple([phase_word(code & PHASE_CODE) for code in codes])


_NO_TIME = dict.fromkeys((*WORK_PHASES, "comm_wait"), 0)
_in_work = itemgetter(*WORK_PHASES)


def facts_of(steps: Iterable[Step]) -> list[StepFacts]:
    """The facts of each step that has a number and a duration."""
    found = []
    # This loop runs for every step of every rank, so it must be fast.
    for step in steps:
        number, ended_ns, gc_s = step.number, step.ended_ns, step.gc_s
        took_ns = ended_ns - step.began_ns
        if number is None or took_ns <= 0:
            continue
        spent_ns, unusual_ns = _NO_TIME.copy(), _NOTHING
        for word, ns in zip(_words(step.parts.codes), step.parts.spans_ns, strict=True):
            spent_ns[word] = spent_ns.get(word, 0) + ns
        if len(spent_ns) > len(_NO_TIME):
            unusual_ns = {word: spent_ns[word] for word in UNUSUAL_PHASES if word in spent_ns}
        unusual = bool(unusual_ns) or step.skipped or step.profiled
        collects = gc_s > _SMALL_GC_S and gc_s > min(_GC_SHARE * took_ns / 1e9, _LONG_GC_S)
        facts = StepFacts(
            number,
            ended_ns,
            took_ns,
            spent_ns["comm_wait"],
            _in_work(spent_ns),
            unusual_ns,
            unusual or collects,
            step.work,
            garbage_ns=round(gc_s * 1e9) if collects and not unusual else 0,
            measured="unmeasured" not in spent_ns,
            calls=step.calls,
        )
        found.append(facts)
    return found


# -- steps by the device's clock, which measures only durations of phases

# At most this many steps wait for their record by the device's clock; older ones are dropped.
_MOST_WAITING = 1000
# Each word of `Step.paced` has the phase code in the bits from this one up, the time in ns below.
_PACED_SHIFT = 48
_PACED_NS = (1 << _PACED_SHIFT) - 1
_CODES = [PHASES[word] for word in WORK_PHASES]


class DeviceSteps:
    """Joins two records of each step of one rank: by its host's clock and by its device's clock."""

    def __init__(self) -> None:
        # By number: the steps by the host's clock whose record by the device's clock is still
        # missing.
        self._on_host: dict[int, StepFacts] = {}
        # The number of the last step, and how far the device lagged behind its host when that step
        # ended.
        self._last: tuple[int, int | None] = (-1, None)

    def feed_host(self, steps: Sequence[StepFacts]) -> None:
        """Add steps by the host's clock."""
        on_host = self._on_host
        for each in steps:
            on_host[each.number] = each
        while len(on_host) > _MOST_WAITING:
            del on_host[next(iter(on_host))]

    def feed(self, steps: Sequence[Step]) -> list[StepFacts]:
        """Add steps by the device's clock; returns the joined facts.

        Unmeasured steps are returned as the host recorded them.
        """
        by_number = {step.number: step for step in steps}
        found = []
        for facts in facts_of(steps):
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
                    # The two clocks drift apart, so compute the end of the step from the host's
                    # clock and the lag.
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
