"""Makes the card of a run from the journal of its first rank."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from math import isfinite

from otel_ddp import shown
from otel_ddp.history.terminal import Card, CardValue
from otel_ddp.journal.parser import Journal, Name
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.values import (
    Extremes,
    Point,
    chosen_directions,
    direction,
    last_values,
)
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import STATES


def card_of(
    reader: Journal,
    state: str,
    lasted_s: float,
    extremes: Mapping[Name, Extremes],
    sentences: Sequence[str] = (),
    look: Sequence[str] = (),
) -> Card | None:
    """What is known of a run when it ends; None of one without a step."""
    totals = _Totals(reader)
    steps = round(totals.sum_of(catalog.TRAINING_STEPS))
    values, last_step = _values(reader, extremes)
    if not steps and last_step < 0:
        return None
    process = ProcessState.read(reader, STATES[state])
    group, run = process.group, process.run or "?"
    world, rank = process.world_size, process.rank
    hook_s = totals.sum_of(catalog.OTEL_DDP_HOOK_TIME)
    phases_s = totals.phases_s()
    return Card(
        title=f"run {group}/{run}" if group else f"run {run}",
        state=state,
        duration_s=lasted_s,
        reason=process.reason,
        where=f"{world} ranks" if world and world > 1 else "",
        steps=steps or last_step + 1,
        step_s=totals.mean_of(catalog.TRAINING_STEP_DURATION),
        phases_s=phases_s,
        of_rank=f"rank {rank}" if world and world > 1 and rank is not None else "",
        values=values,
        sentences=sentences,
        cost=f"hooks {shown.seconds(hook_s)} of this rank" if hook_s else "",
        look=look,
    )


class _Totals:
    """What the process has counted."""

    def __init__(self, reader: Journal) -> None:
        self._totals = reader.totals()

    def sum_of(self, metric: catalog.Metric) -> float:
        """Over all its attributes."""
        return sum(each.values[0] for each in self._totals if each.metric == metric.name)

    def mean_of(self, metric: catalog.Metric) -> float | None:
        """Of a histogram: its sum, then the count of each bucket."""
        for each in self._totals:
            counted = float(sum(each.values[1:]))
            if each.metric == metric.name and counted:
                return each.values[0] / counted
        return None

    def phases_s(self) -> dict[str, float]:
        """By the device's clock where it has counted: the host's phases only launch there."""
        by_clock: dict[str, dict[str, float]] = {}
        for each in self._totals:
            if each.metric == catalog.TRAINING_PHASE_TIME.name:
                phases = by_clock.setdefault(each.attributes.get("clock", ""), {})
                word = str(each.attributes.get("phase"))
                phases[word] = phases.get(word, 0.0) + each.values[0]
        return by_clock.get("device") or by_clock.get("host") or {}


def _values(reader: Journal, extremes: Mapping[Name, Extremes]) -> tuple[list[CardValue], int]:
    """The logged values, those with a best one first; and the last step of any of them."""
    chosen, values, last_step = chosen_directions(reader), [], -1
    for name, last in last_values(reader).items():
        way = direction(name.text, chosen)
        best = _with(last, extremes[name]).best(way) if way and name in extremes else None
        shown = (best.value, best.step) if best is not None else (None, None)
        values.append(CardValue(name.text, name.split, last.value, *shown))
        last_step = max(last_step, -1 if last.step is None else last.step)
    return sorted(values, key=lambda value: value.best is None), last_step


def _with(last: Point, extremes: Extremes) -> Extremes:
    """The agent may have written its document before the last value."""
    points = [*extremes, *([last] if isfinite(last.value) else [])]
    by_value = operator.attrgetter("value")
    return Extremes(min(points, key=by_value), max(points, key=by_value))
