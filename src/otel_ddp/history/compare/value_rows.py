"""What each logged value came to on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from otel_ddp.history.compare import blocks
from otel_ddp.history.compare.blocks import Difference
from otel_ddp.history.compare.row import Row, corrected, mean_of_runs
from otel_ddp.history.compare.side import Side, Value

# Of the steps that both runs have: the part whose values are compared.
_LAST_PART = 0.2

_Values = list[Value]


def value_rows(before: Sequence[Side], after: Sequence[Side]) -> list[Row]:
    """What all runs have logged."""
    rows = []
    for key in ((each.name, each.split) for each in before[0].values):
        one, other = ([_value(run, *key) for run in runs] for runs in (before, after))
        first, second = ([each for each in runs if each is not None] for runs in (one, other))
        if len(first) == len(one) and len(second) == len(other):
            rows.append(_value_row(first, second))
    return corrected(rows)


def _value(side: Side, name: str, split: str) -> Value | None:
    return next((each for each in side.values if (each.name, each.split) == (name, split)), None)


def _value_row(before: _Values, after: _Values) -> Row:
    until = min((each.steps[-1] for each in (*before, *after) if each.steps), default=0)
    first, second = ([_last_part(each, until) for each in runs] for runs in (before, after))
    if len(first) == len(second) == 1:
        [one], [other] = first, second
        found = _test_values(one, other)
        few = min(len(one), len(other))
        why = f"only {few} value{'' if few == 1 else 's'} in the last part"
    else:
        means = ([fmean(run.values()) for run in runs if run] for runs in (first, second))
        found, why = blocks.test_runs(*means), "too few runs"
    if found is None:
        means_of_both = (
            mean_of_runs([[*run.values()] for run in runs]) for runs in (first, second)
        )
        shown = (*means_of_both,)
    else:
        shown = (found.before, found.after)
    return Row(
        before[0].name,
        "",
        shown[0],
        shown[1],
        before[0].direction or after[0].direction,
        found,
        None if found is None else found.p,
        "" if found else why,
        before[0].split,
        True,
        (_only([each.last for each in before]), _only([each.last for each in after])),
        (_only([each.best for each in before]), _only([each.best for each in after])),
    )


def _last_part(value: Value, until: int) -> dict[int, float]:
    since = until - until * _LAST_PART
    pairs = zip(value.steps, value.means, strict=True)
    return {step: mean for step, mean in pairs if since <= step <= until}


def _test_values(one: dict[int, float], other: dict[int, float]) -> Difference | None:
    paired = [step for step in one if step in other]
    if 2 * len(paired) >= max(len(one), len(other)):
        return blocks.test_pairs([one[step] for step in paired], [other[step] for step in paired])
    return blocks.test_values([*one.values()], [*other.values()])


def _only(found: Sequence[float | None]) -> float | None:
    """The mean over runs; None if one has none."""
    known = [each for each in found if each is not None]
    return fmean(known) if known and len(known) == len(found) else None
