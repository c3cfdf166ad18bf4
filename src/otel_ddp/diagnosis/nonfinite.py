"""Finds logged values that became NaN or infinite: the first one, its rank and step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from otel_ddp.diagnosis.detector import Detector, NonfiniteValue, Observation, RankState
from otel_ddp.diagnosis.say import first_of, rank_list, rank_name, rank_number
from otel_ddp.diagnosis.verdict import Change, Labels, Verdict, run_labels

# The verdict closes when all values have been finite for this long.
_FINITE_FOR_NS = 60 * 10**9
# The sentence lists at most this many names.
_MOST_NAMED = 8


class _Found(NamedTuple):
    labels: Labels
    value: NonfiniteValue


class Nonfinite(Detector):
    """Keeps one verdict per run, on the first non-finite value. More would say nothing new: soon
    after the loss has become NaN, nearly all values are NaN on all ranks."""

    def __init__(self) -> None:
        self._values: dict[Labels, Sequence[NonfiniteValue]] = {}
        self._open: Verdict | None = None
        self._first: _Found | None = None
        self._finite_since_ns = 0

    def feed(self, rank: RankState, seen: Observation) -> None:
        if seen.nonfinite is not None:
            self._values[rank.labels] = seen.nonfinite

    def poll(self, now_ns: int) -> list[Change]:
        every = [_Found(labels, one) for labels, some in self._values.items() for one in some]
        found = sorted(every, key=lambda each: (each.value.order, each.labels))
        if not found:
            return self._close_when_finite(now_ns)
        self._finite_since_ns = 0
        # The first non-finite value stays in the verdict even if it becomes finite again. It is
        # replaced only by a value of an earlier step: another rank's journal may have been read
        # later.
        if self._first is None or found[0].value.order < self._first.value.order:
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
    labels, first = found[0]
    what = "NaN" if math.isnan(first.value) else "infinite"
    lost = [
        each
        for each in found[1:]
        if each.labels != labels
        and (each.value.name, each.value.split) == (first.name, first.split)
        and each.value.may_precede(first)
    ]
    ranks = [labels, *(each.labels for each in lost)]
    who = f"{rank_list(ranks)}, and which was first is not known" if lost else rank_name(labels)
    at = _steps(first, [first.finite_step, *(each.value.finite_step for each in lost)])
    names = list(dict.fromkeys(each.value.name for each in found))
    others = names[1:]
    since = f" Since then also: {first_of(others, _MOST_NAMED)}." if others else ""
    return Verdict(
        "nonfinite",
        run_labels(labels),
        "",
        f"{first.name} became {what}{at} on {who}.{since} Look at the batches, the learning rate, "
        "divisions and logarithms.",
        {
            "cause": f"{first.name} on {rank_list(ranks)}",
            "name": first.name,
            "split": first.split,
            "value": what,
            "rank": "" if lost else rank_number(labels),
            "finite_step": first.finite_step,
            "names": names,
        },
        first.step,
        first.time_ns,
    )


def _steps(first: NonfiniteValue, finite: Sequence[int | None]) -> str:
    known = [step for step in finite if step is not None]
    if first.step is None:
        return ""
    if len(known) < len(finite):
        return f" by step {first.step}"
    if min(known) == first.step - 1:
        return f" at step {first.step}"
    return f" between steps {min(known)} and {first.step}"
