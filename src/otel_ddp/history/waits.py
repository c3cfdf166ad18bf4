"""Computes the page's picture of who waits for whom: bars of late ranks, and a strip over steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median, median_low
from typing import Any

from otel_ddp import plain
from otel_ddp.history.buckets import FAR, STEPS, Columns, StepBucket
from otel_ddp.history.newest_attempt import rank_order
from otel_ddp.history.reader import History, Series
from otel_ddp.history.verdicts import named_ranks, shown_first
from otel_ddp.history.whole_run import WholeRun, column_width
from otel_ddp.vocabulary.catalog import CHECKPOINT_EVENT, TRAINING_COLLECTIVE_STEP_WAIT
from otel_ddp.vocabulary.words import ENDED_STATES, MEASURED_PHASES, WORK_PHASES

# The bars cover the last _LAST_STEPS steps. The strip covers the last _STRIP_STEPS steps while the
# run goes on, else all steps.
_LAST_STEPS, _STRIP_STEPS = 100, 600
_MOST_SUSPECTS = 3
# Limits of the strip of lateness: its rows, its columns, and the number of ranks times columns.
_MOST_ROWS, _MOST_COLUMNS, _MOST_CELLS = 32, 120, 60_000
# Each dimension of the device mesh has at most _MOST_BARS bars. They show means of the samples from
# _NEAR_S seconds before the shown steps to _NEAR_S seconds after them.
_MOST_BARS, _NEAR_S = 128, 15
# A rank is a suspect if its work takes longer than usual by this share of a step.
_LATE = 0.05
_STRIP = [STEPS.names.index(each) for each in ("first", "steps", *(f"{w}_ns" for w in WORK_PHASES))]
_Series = Mapping[str, tuple[History, Series]]
_Mean = Mapping[str, Any]


def _mean(rank: str, node: str, found: StepBucket) -> dict[str, Any]:
    """The mean step of one rank over the bucket."""
    phases = {word: ns / found.steps / 1e9 for word, ns in found.phases_ns.items()}
    return {
        "rank": rank,
        "node": node,
        "step_s": found.took_ns / found.steps / 1e9,
        "work_per_s": found.work / found.took_ns * 1e9,
        # The time of a step without waits for other ranks, and without unusual phases.
        "work_s": sum(phases[word] for word in WORK_PHASES),
        "phases": phases,
    }


def waits(run: WholeRun) -> dict[str, Any]:
    """The data of the bars, and of the strip of lateness below them.

    If the verdict on lateness that the page shows is over, the bars cover its steps; else they
    cover the last steps of the run. Each suspect has a bar. The ranks of the verdict are suspects.
    """
    series = {one.key.rank: (history, one) for history, one in reversed(run.step_series())}
    spans = [span for each, one in series.values() if (span := each.step_range(one))]
    if not spans:
        return {"ranks": []}
    lowest, highest = min(low for low, _ in spans), max(high for _, high in spans)
    first_ones = shown_first(run.verdicts(), run.newest.began_ns)
    # A verdict is on lateness if its evidence has the excess, i.e. how late the rank is.
    lates = (each for each in first_ones if "excess_s" in plain.mapping(each.get("evidence")))
    late = next(lates, {})
    is_past = late.get("until_ns") is not None
    first, until = max(highest - _LAST_STEPS + 1, lowest), highest
    if is_past and late["since_step"] is not None:
        first, until = (late[key] - run.shift for key in ("since_step", "until_step"))
    goes_on = run.state not in ENDED_STATES and not is_past
    begins = max(highest - _STRIP_STEPS + 1, lowest) if goes_on else lowest
    found, times_ns = list[dict[str, Any]](), list[int]()
    for rank, (history, one) in series.items():
        for row in STEPS.in_pieces(history.columns(one, first, until), FAR):
            bucket = StepBucket.of(row)
            found.append(_mean(rank, run.node_of(history, rank), bucket))
            times_ns += [bucket.first_ns, bucket.last_ns]
    usual_s = median_low(each["work_s"] for each in found) if found else 0.0
    named = named_ranks(late)
    found.sort(key=lambda each: (each["rank"] not in named, -each["work_s"]))
    suspects = _suspects(found, usual_s, named)
    return {
        "first": first + run.shift,
        "until": until + run.shift,
        "step_s": median(each["step_s"] for each in found) if found else None,
        "work_per_s": sum(each["work_per_s"] for each in found),
        "usual_work_s": usual_s,
        "ranks": suspects,
        "others": _together(found[len(suspects) :]),
        "dimensions": _dimensions(run, times_ns),
        "strip": _strip(series, begins, highest, run.shift),
        "checkpoint": _checkpoint(run),
    }


def _work_s(columns: Columns, wide: int) -> dict[int, float]:
    """The mean work per step in each column of the strip, by the number of the column.

    *columns*: the data that _STRIP selects. *wide*: the number of steps in a column.
    """
    steps, work_ns = Counter[int](), Counter[int]()
    for first, many, *parts_ns in zip(*columns, strict=True):
        steps[first // wide] += many
        work_ns[first // wide] += sum(parts_ns)
    return {at: work_ns[at] / many / 1e9 for at, many in steps.items()}


def _suspects(found: Sequence[_Mean], usual_s: float, named: Sequence[str]) -> list[_Mean]:
    """Of the first _MOST_SUSPECTS ranks in *found*, those that are late or that the verdict names.

    If *found* has no more ranks than that, all of them.
    """
    return [
        each
        for each in found[:_MOST_SUSPECTS]
        if len(found) <= _MOST_SUSPECTS
        or each["rank"] in named
        or each["work_s"] - usual_s > _LATE * each["step_s"]
    ]


def _together(others: Sequence[_Mean]) -> dict[str, Any] | None:
    if not others:
        return None
    count, work_s = len(others), [each["work_s"] for each in others]
    phases = {w: sum(each["phases"][w] for each in others) / count for w in MEASURED_PHASES}
    return {"count": count, "phases": phases, "work_s": [min(work_s), max(work_s)]}


def _dimensions(run: WholeRun, times_ns: Sequence[int]) -> list[dict[str, Any]]:
    """For each dimension of the device mesh, how long each rank waited per step.

    *times_ns*: the period from the first to the last of these times is used.
    """
    found: dict[str, dict[str, float]] = {}
    name = TRAINING_COLLECTIVE_STEP_WAIT.name
    first_s, until_s = (extreme(times_ns, default=0) // 10**9 for extreme in (min, max))
    waits = [(each, one) for each in run.histories for one in each.series("node", name)]
    for history, one in run.by_rank(waits):
        for each in history.sums(one, first_s - _NEAR_S, until_s + _NEAR_S, most=1):
            of_ranks = found.setdefault(str(dict(one.key.labels).get("dimension")), {})
            waited_s = each.total / max(each.finite, 1)
            of_ranks[one.key.rank] = of_ranks.get(one.key.rank, 0.0) + waited_s
    return [
        {"name": dimension, "waits_s": [*waits_s.items()][:_MOST_BARS]}
        for dimension, waits_s in found.items()
    ]


def _strip(series: _Series, first: int, until: int, shift: int) -> dict[str, Any]:
    """How much longer each rank worked per step than the median rank, in columns of steps.

    With many ranks, a row stands for several ranks and shows the slowest of them. *shift*: see
    `History.shift`.
    """
    most = max(min(_MOST_COLUMNS, _MOST_CELLS // len(series)), 2)
    wide = column_width(series.values(), first, until, most)
    numbers = range(first // wide, until // wide + 1)
    work_s = {
        rank: found
        for rank, (history, one) in series.items()
        if (found := _work_s(history.columns(one, first, until, _STRIP), wide))
    }
    usual_s = {
        at: median_low(known)
        for at in numbers
        if (known := [each[at] for each in work_s.values() if at in each])
    }
    ranks = sorted(work_s, key=rank_order)
    each_row = math.ceil(len(ranks) / _MOST_ROWS)
    parts = [ranks[at : at + each_row] for at in range(0, len(ranks), each_row)]
    return {
        "x": [max(at * wide, first) + shift for at in numbers],
        "until": until + shift,
        "rows": [
            {
                "ranks": [part[0], part[-1]],
                "late_s": [
                    max(
                        (work_s[r][at] - usual_s[at] for r in part if at in work_s[r]), default=None
                    )
                    for at in numbers
                ],
            }
            for part in parts
        ],
    }


def _checkpoint(run: WholeRun) -> dict[str, Any] | None:
    """The last checkpoint of any rank."""
    found = [
        event
        for each in run.histories
        for event in each.events(10, like=CHECKPOINT_EVENT)
        if event.name == CHECKPOINT_EVENT
    ]
    if not found:
        return None
    last = max(found, key=lambda event: event.time_ns)
    took_s = plain.number(last.attributes.get("duration_s"))
    return {"step": last.step, "ended_ns": last.time_ns, "took_s": took_s}
