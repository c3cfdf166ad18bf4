"""Compares two sides: how long a step takes, and what it is made of; what each value came to."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from otel_ddp.history.compare import blocks
from otel_ddp.history.compare.blocks import Difference
from otel_ddp.history.compare.side import Side, Value
from otel_ddp.history.group_steps import SPECIAL_PHASES, Cell

SIGNIFICANT_P = 0.01
# Below it a change is not worth a word, however certain it is.
LEAST_CHANGE = 0.01
# A phase that is less of a step than this in both runs is listed, and not tested.
_LEAST_SHARE = 0.01
# A phase that changes by less than this share of a step is not told of.
_LEAST_OF_STEP = 0.005
# The first steps fill caches, grow buffers, tune kernels.
_WARM_UP_SHARE, _FEWEST_WARM_UP, _MOST_WARM_UP = 0.05, 10, 500
# Of the steps that both runs have: the part whose values are compared.
_LAST_PART = 0.2

STEP_TIME, THROUGHPUT = "step_time", "throughput"
# What people call the catalogue's words.
PHASE_NAMES = {"comm_wait": "wait"}


class Row(NamedTuple):
    """One measure of both runs."""

    name: str
    unit: str
    before: float | None
    after: float | None
    better: str
    """`min`, `max`, or empty."""
    difference: Difference | None
    """None: there was no test, and `untested` says why."""
    p: float | None
    """Corrected for the number of tests."""
    untested: str = ""
    split: str = ""
    of_value: bool = False
    lasts: tuple[float | None, float | None] = (None, None)
    bests: tuple[float | None, float | None] = (None, None)
    matters: bool = True
    """False: a change of this phase is hardly any part of a step."""

    @property
    def shown(self) -> str:
        return f"{self.name} ({self.split})" if self.split else self.name

    @property
    def change(self) -> float | None:
        """As a share of before; None if that is unknown or 0."""
        if self.before is None or self.after is None or not self.before:
            return None
        return (self.after - self.before) / abs(self.before)

    @property
    def significant(self) -> bool:
        """Whether chance does not explain the difference."""
        return self.p is not None and self.p < SIGNIFICANT_P

    @property
    def verdict(self) -> str:
        """`better`, `worse`, `differs`, or empty if there is nothing to say."""
        changed = self.change is None or abs(self.change) >= LEAST_CHANGE
        if not (self.significant and changed and self.matters):
            return ""
        if not self.better or self.before is None or self.after is None:
            return "differs"
        return "better" if (self.after < self.before) == (self.better == "min") else "worse"


class Used(NamedTuple):
    """How many steps of a run went into the test, and how many did not."""

    used: int
    warm_up: int
    unusual: int
    pauses: int


class Comparison(NamedTuple):
    """Two runs beside each other."""

    before: Side
    after: Side
    used: tuple[Used, Used]
    rows: list[Row]
    conditions: list[tuple[str, str, str]]
    """What is not the same, and makes the steps differ by itself."""
    config: list[tuple[str, str, str]]
    """Other settings that differ."""
    block: int
    """Steps in the longest block."""

    def named(self, name: str, split: str | None = None) -> list[Row]:
        """The rows of this name; of any split unless one is given."""
        return [row for row in self.rows if row.name == name and split in (None, row.split)]


def compare(before: Side, after: Side, warm_up: int | None = None) -> Comparison:
    """All that both sides have. *warm_up*: steps to leave out, instead of our choice."""
    first, first_used = _usual(before.cells, warm_up)
    second, second_used = _usual(after.cells, warm_up)
    rows = [*_corrected(_step_rows(first, second)), *_special_rows(before, after)]
    rows += _corrected(_value_rows(before.values, after.values))
    others = set(before.conditions) | set(after.conditions)
    return Comparison(
        *(before, after, (first_used, second_used), rows),
        _differing(before.conditions, after.conditions),
        [each for each in _differing(before.config, after.config) if each[0] not in others],
        max((row.difference.block for row in rows if row.difference), default=0),
    )


def _differing(one: dict[str, str], other: dict[str, str]) -> list[tuple[str, str, str]]:
    keys = dict.fromkeys((*one, *other))
    pairs = [(key, one.get(key, "-"), other.get(key, "-")) for key in keys]
    return [(key, a, b) for key, a, b in pairs if a != b]


# -- steps


def _usual(cells: Sequence[Cell], warm_up: int | None) -> tuple[list[Cell], Used]:
    """The steps that are like most: after the warm-up, without special ones and pauses."""
    total = sum(each.steps for each in cells)
    if warm_up is None:
        share = int(total * _WARM_UP_SHARE)
        warm_up = min(max(share, _FEWEST_WARM_UP), _MOST_WARM_UP)
    passed, warm = 0.0, list(cells)
    while warm and passed < warm_up:
        passed += warm.pop(0).steps
    usual = [each for each in warm if each.usual and each.steps]
    unusual = sum(each.steps for each in warm) - sum(each.steps for each in usual)
    kept = [usual[at] for at in blocks.without_pauses([c.took_s for c in usual])] if usual else []
    used = sum(each.steps for each in kept)
    pauses = sum(each.steps for each in usual) - used
    return kept, Used(round(used), round(passed), round(unusual), round(pauses))


def _step_rows(first: Sequence[Cell], second: Sequence[Cell]) -> list[Row]:
    rows = [_row(STEP_TIME, "s", "min", *([c.took_s for c in side] for side in (first, second)))]
    works = [[c.work / c.took_s for c in side if c.took_s] for side in (first, second)]
    if all(any(side) for side in works):
        rows.append(_row(THROUGHPUT, "1/s", "max", *works))
    whole = [fmean(c.took_s for c in side) if side else 0.0 for side in (first, second)]
    words = dict.fromkeys(word for side in (first, second) for c in side[:1] for word in c.phases_s)
    for word in words:
        if word in SPECIAL_PHASES:
            continue
        columns = [[c.phases_s.get(word, 0.0) for c in side] for side in (first, second)]
        if not any(any(column) for column in columns):
            continue
        row = _row(PHASE_NAMES.get(word, word), "s", "min", *columns)
        means = (row.before or 0.0, row.after or 0.0)
        if all(mean < _LEAST_SHARE * step_s for mean, step_s in zip(means, whole, strict=True)):
            row = row._replace(difference=None, p=None, untested="below 1 % of a step")
        rows.append(row._replace(matters=abs(means[1] - means[0]) >= _LEAST_OF_STEP * whole[0]))
    return rows


def _row(name: str, unit: str, better: str, one: Sequence[float], other: Sequence[float]) -> Row:
    found = blocks.test(one, other)
    if found is None:
        before, after = (fmean(each) if each else None for each in (one, other))
        return Row(name, unit, before, after, better, None, None, "too few steps")
    return Row(name, unit, found.before, found.after, better, found, found.p)


def _special_rows(before: Side, after: Side) -> list[Row]:
    """What comes now and then: its share of all steps, without a test."""
    rows = []
    for word in SPECIAL_PHASES:
        one, other = (_share_of_all(side.cells, word) for side in (before, after))
        if one or other:
            why = "not in every step"
            rows.append(Row(word, "s", one, other, "min", None, None, why, matters=False))
    return rows


def _share_of_all(cells: Sequence[Cell], word: str) -> float:
    steps = sum(each.steps for each in cells)
    return sum(each.phases_s.get(word, 0.0) * each.steps for each in cells) / (steps or 1)


def _corrected(rows: Sequence[Row]) -> list[Row]:
    tested = [row for row in rows if row.difference is not None]
    adjusted = iter(blocks.holm([row.difference.p for row in tested if row.difference]))
    return [row if row.difference is None else row._replace(p=next(adjusted)) for row in rows]


# -- values


def _value_rows(before: Sequence[Value], after: Sequence[Value]) -> list[Row]:
    others = {(each.name, each.split): each for each in after}
    return [
        _value_row(each, others[each.name, each.split])
        for each in before
        if (each.name, each.split) in others
    ]


def _value_row(one: Value, other: Value) -> Row:
    until = min(one.steps[-1:] + other.steps[-1:], default=0)
    since = until - until * _LAST_PART
    first, second = (
        {s: m for s, m in zip(each.steps, each.means, strict=True) if since <= s <= until}
        for each in (one, other)
    )
    paired = [step for step in first if step in second]
    if 2 * len(paired) >= max(len(first), len(second)):
        found = blocks.test_pairs([first[s] for s in paired], [second[s] for s in paired])
    else:
        found = blocks.test_values([*first.values()], [*second.values()])
    if found is not None:
        before: float | None = found.before
        after: float | None = found.after
    else:
        before, after = (fmean(each.values()) if each else None for each in (first, second))
    return Row(
        *(one.name, "", before, after, one.direction or other.direction, found),
        None if found is None else found.p,
        "" if found else f"only {min(len(first), len(second))} values in the last part",
        *(one.split, True, (one.last, other.last), (one.best, other.best)),
    )
