"""Says when logged values are no longer finite: which was first, on which rank, at which step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from otel_ddp.diagnosis.facts import called, run_of
from otel_ddp.diagnosis.verdict import Change, Verdict, Who

# It is over when every value has been finite for so long.
_WELL_NS = 60 * 10**9
_MOST_NAMED = 8


class Odd(NamedTuple):
    """A name whose values were finite once and are not any more, and the first that was not."""

    name: str
    split: str
    value: float
    step: int | None
    time_ns: int

    @property
    def order(self) -> tuple[bool, int, int]:
        """Which was first: by the step where there is one."""
        return self.step is None, self.step or 0, self.time_ns


class _Found(NamedTuple):
    order: tuple[bool, int, int]
    who: Who
    odd: Odd


class Nonfinite:
    """The logged values of one run on this node.

    One verdict a run: where the loss is NaN, so is soon nearly everything, on every rank.
    """

    def __init__(self) -> None:
        self._odd: dict[Who, Sequence[Odd]] = {}
        self._open: Verdict | None = None
        self._first: _Found | None = None
        self._well_since_ns = 0

    def feed(self, who: Who, odd: Sequence[Odd]) -> None:
        """What is not finite on this rank now. What it was when the rank ended, stays."""
        self._odd[who] = odd

    def poll(self, now_ns: int) -> list[Change]:
        """What has changed since the last look."""
        found = sorted(
            (_Found(odd.order, who, odd) for who, each in self._odd.items() for odd in each),
            key=lambda each: each[:2],
        )
        if not found:
            return self._pass(now_ns)
        self._well_since_ns = 0
        # The first one stays it though it may be finite again; but an earlier one may be told late.
        if self._first is None or found[0].order < self._first.order:
            self._first = found[0]
        verdict = _verdict([self._first, *(each for each in found if each != self._first)])
        if self._open is not None and verdict.sentence == self._open.sentence:
            return []
        self._open = verdict
        return [Change(verdict, True)]

    def _pass(self, now_ns: int) -> list[Change]:
        if self._open is None:
            return []
        self._well_since_ns = self._well_since_ns or now_ns
        if now_ns - self._well_since_ns < _WELL_NS:
            return []
        verdict, self._open, self._first, self._well_since_ns = self._open, None, None, 0
        return [Change(verdict, False)]


def _verdict(found: Sequence[_Found]) -> Verdict:
    _, who, first = found[0]
    value = "NaN" if math.isnan(first.value) else "infinite"
    at = "" if first.step is None else f" at step {first.step}"
    with_it = [
        each
        for _, each, odd in found[1:]
        if each != who and (odd.name, odd.split, odd.step) == (first.name, first.split, first.step)
    ]
    also = f", and on {', '.join(called(each) for each in with_it)}" if with_it else ""
    names = list(dict.fromkeys(odd.name for _, _, odd in found))
    others = names[1:]
    shown = ", ".join(others[:_MOST_NAMED]) + (", ..." if others[_MOST_NAMED:] else "")
    since = f" Since then also: {shown}." if others else ""
    return Verdict(
        "nonfinite",
        run_of(who),
        "",
        f"{first.name} became {value}{at} on {called(who)}{also}.{since} Look at the batch of this "
        "step, at the learning rate, and at what divides or takes logarithms.",
        {
            # What it is: told anew where it turns out to be another one.
            "cause": f"{first.name} on {called(who)}",
            "name": first.name,
            "split": first.split,
            "value": value,
            "rank": dict(who).get("rank", ""),
            "names": names,
        },
        first.step,
        first.time_ns,
    )
