"""Estimates the phases of unmeasured steps from the phases of recent measured steps."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from otel_ddp.diagnosis.steps import Parts, Step
from otel_ddp.vocabulary.words import PHASE_CODE, PHASES, UNMEASURED, UNUSUAL_PHASES

# How many of the latest measured steps an estimate averages.
_LAST = 16
# If more consecutive steps than this have no device time, records were lost: do not estimate.
_LONGEST_GAP = 1000
_OTHER = PHASES["other"]
# Estimates never contain these phases, since steps with these phases are always measured.
_UNUSUAL = {PHASES[word] for word in UNUSUAL_PHASES}
_ALONE = bytes([UNMEASURED])


class _Shares(NamedTuple):
    """The share of each phase in the step time; by default `other` has all of it."""

    codes: bytes = bytes([_OTHER])
    shares: Sequence[float] = (1.0,)

    @classmethod
    def of(cls, spent_ns: Mapping[int, float]) -> _Shares:
        whole_ns = sum(spent_ns.values())
        if not whole_ns:
            return cls()
        return cls(bytes(spent_ns), [ns / whole_ns for ns in spent_ns.values()])

    def spans_ns(self, ns: int) -> list[int]:
        """Divide a time among the phases; the parts add up exactly."""
        found = [int(ns * share) for share in self.shares]
        found[-1] += ns - sum(found)
        return found


class PhaseShares:
    """Estimates the phases of a process's unmeasured steps, on the clock of its host or its device.

    The durations of the steps themselves are measured.
    """

    def __init__(self, *, on_device: bool = False) -> None:
        """*on_device*: estimate for the device's clock. Of several unmeasured steps in a row, this
        clock times only the end of the last one, so these steps are assumed to be equally long."""
        self._on_device = on_device
        self._last: Step | None = None
        self._measured: deque[Step] = deque(maxlen=_LAST)
        # The mean of `_measured`; None after a new measured step, until an estimate needs the mean.
        self._usual: _Shares | None = _Shares()

    def fill(self, steps: Iterable[Step]) -> list[Step]:
        """The steps in order, with estimated phases if they were not measured."""
        # Hot path: runs for each step of each rank.
        found = []
        for step in steps:
            if step.measured:
                self._measured.append(step)
                self._usual = None
                found.append(step)
            elif self._on_device:
                found += map(self._estimated, _since(self._last, step))
            else:
                found.append(self._estimated(step))
            self._last = step
        return found

    def _estimated(self, step: Step) -> Step:
        if self._usual is None:
            self._usual = _Shares.of(
                _by_phase(span for each in self._measured for span in each.spans())
            )
        usual, began_ns = self._usual, step.began_ns
        if step.parts.codes == _ALONE:
            # The usual case: no part of the step was measured.
            parts = Parts(began_ns, usual.codes, usual.spans_ns(step.ended_ns - began_ns))
            return step._replace(parts=parts)
        codes, spans_ns = zip(*_filled(step.spans(), usual), strict=True)
        return step._replace(parts=Parts(began_ns, bytes(codes), spans_ns))


def _since(before: Step | None, step: Step) -> Iterator[Step]:
    """The steps after *before*, up to and including *step*. They share the time equally."""
    if before is None or before.number is None or step.number is None:
        return
    since_ns, count = before.ended_ns, step.number - before.number
    if 0 < count <= _LONGEST_GAP and since_ns < step.ended_ns:
        edges = [since_ns + (step.ended_ns - since_ns) * i // count for i in range(count + 1)]
        for number, (began_ns, ended_ns) in enumerate(pairwise(edges), before.number + 1):
            parts = Parts(began_ns, _ALONE, (ended_ns - began_ns,))
            yield Step(number, began_ns, ended_ns, parts, 0.0, False, 0)


def _by_phase(spans: Iterable[tuple[int, int]]) -> Counter[int]:
    found: Counter[int] = Counter()
    for code, ns in spans:
        if code & PHASE_CODE not in _UNUSUAL:
            found[code] += ns
    return found


def _filled(spans: Iterable[tuple[int, int]], shares: _Shares) -> Iterator[tuple[int, int]]:
    for code, ns in spans:
        if code != UNMEASURED:
            yield code, ns
        else:
            yield from zip(shares.codes, shares.spans_ns(ns), strict=True)
