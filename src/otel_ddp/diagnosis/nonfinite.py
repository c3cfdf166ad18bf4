"""Finds logged values that became NaN or infinite, and which was first, where and when."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from otel_ddp.diagnosis.verdict import Change, Labels, Verdict, run_labels
from otel_ddp.diagnosis.wording import rank_name

# The verdict is over when every value has been finite for so long.
_FINITE_FOR_NS = 60 * 10**9
_MOST_NAMED = 8


class NonfiniteValue(NamedTuple):
    """A name whose values were finite once, with the first value that was not."""

    name: str
    split: str
    value: float
    step: int | None
    time_ns: int

    @property
    def order(self) -> tuple[bool, int, int]:
        """Sorts the first one first: by step, or by time where a value has no step."""
        return self.step is None, self.step or 0, self.time_ns


class _Found(NamedTuple):
    order: tuple[bool, int, int]
    labels: Labels
    value: NonfiniteValue


class Nonfinite:
    """The logged values of one run on this node.

    One verdict a run: once the loss is NaN, nearly every value soon is, on every rank.
    """

    def __init__(self) -> None:
        self._values: dict[Labels, Sequence[NonfiniteValue]] = {}
        self._open: Verdict | None = None
        self._first: _Found | None = None
        self._finite_since_ns = 0

    def feed(self, labels: Labels, values: Sequence[NonfiniteValue]) -> None:
        """The values that are not finite on this rank now; a rank that ended keeps its last."""
        self._values[labels] = values

    def poll(self, now_ns: int) -> list[Change]:
        """What has changed since the last poll."""
        found = sorted(
            (
                _Found(value.order, labels, value)
                for labels, values in self._values.items()
                for value in values
            ),
            key=lambda each: each[:2],
        )
        if not found:
            return self._close_when_finite(now_ns)
        self._finite_since_ns = 0
        # The first one stays, even if it is finite again. An earlier one may be read later.
        if self._first is None or found[0].order < self._first.order:
            self._first = found[0]
        verdict = _verdict([self._first, *(each for each in found if each != self._first)])
        if self._open is not None and verdict.sentence == self._open.sentence:
            return []
        self._open = verdict
        return [Change(verdict, True)]

    def _close_when_finite(self, now_ns: int) -> list[Change]:
        if self._open is None:
            return []
        self._finite_since_ns = self._finite_since_ns or now_ns
        if now_ns - self._finite_since_ns < _FINITE_FOR_NS:
            return []
        verdict, self._open, self._first, self._finite_since_ns = self._open, None, None, 0
        return [Change(verdict, False)]


def _verdict(found: Sequence[_Found]) -> Verdict:
    _, labels, first = found[0]
    what = "NaN" if math.isnan(first.value) else "infinite"
    at = "" if first.step is None else f" at step {first.step}"
    same = [
        each
        for _, each, value in found[1:]
        if each != labels
        and (value.name, value.split, value.step) == (first.name, first.split, first.step)
    ]
    also = f", and on {', '.join(rank_name(each) for each in same)}" if same else ""
    names = list(dict.fromkeys(each.value.name for each in found))
    others = names[1:]
    shown = ", ".join(others[:_MOST_NAMED]) + (", ..." if others[_MOST_NAMED:] else "")
    since = f" Since then also: {shown}." if others else ""
    return Verdict(
        "nonfinite",
        run_labels(labels),
        "",
        f"{first.name} became {what}{at} on {rank_name(labels)}{also}.{since} Look at the batch of "
        "this step, at the learning rate, and at divisions and logarithms.",
        {
            # Another cause is reported as another incident.
            "cause": f"{first.name} on {rank_name(labels)}",
            "name": first.name,
            "split": first.split,
            "value": what,
            "rank": dict(labels).get("rank", ""),
            "names": names,
        },
        first.step,
        first.time_ns,
    )
