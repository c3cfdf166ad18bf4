"""The steps of a run, whatever rank made them: what its ranks do on average."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from otel_ddp.history.reader import StepBucket
from otel_ddp.words import PHASES, UNUSUAL_PHASES

# Time in these is no part of a usual step: a step that has it is called unusual.


class Cell(NamedTuple):
    """Neighbouring steps of one rank, or of all of them."""

    first: int
    steps: float
    took_s: float
    """Of one step, on average; so are the phases and the work."""
    work: float
    usual: bool
    phases_s: dict[str, float]
    began_ns: int


def rank_cells(
    buckets: Sequence[StepBucket], width: int, of_width: int
) -> dict[int, tuple[StepBucket, ...]]:
    """The buckets of one rank by the wider bucket that they are in."""
    found: dict[int, tuple[StepBucket, ...]] = {}
    wide = max(width, of_width)
    for each in buckets:
        start = each.start - each.start % wide
        found[start] = (*found.get(start, ()), each)
    return found


def group_cells(ranks: dict[str, tuple[str, int, list[StepBucket]]]) -> list[Cell]:
    """The steps of all ranks: means over the ranks, and the work of all together."""
    wide = max((width for _, width, _ in ranks.values()), default=1)
    by_start: dict[int, list[Cell]] = {}
    for _, width, buckets in ranks.values():
        for start, group in rank_cells(buckets, width, wide).items():
            by_start.setdefault(start, []).append(one_cell(group))
    cells = [_mean(by_start[start]) for start in sorted(by_start)]
    if wide > 1 and sum(not each.usual for each in cells) > len(cells) / 4:
        # Each bucket has some unusual step in it: only the time of its special phases is taken out.
        cells = [without_special(each) for each in cells]
    return cells


def one_cell(buckets: Iterable[StepBucket]) -> Cell:
    """Neighbouring buckets of one rank as one."""
    group = list(buckets)
    steps = sum(each.steps for each in group)
    share = 1 / (steps or 1)
    return Cell(
        min(each.first for each in group),
        steps,
        sum(each.took_ns for each in group) / 1e9 * share,
        sum(each.work for each in group) * share,
        not any(each.unusual for each in group),
        {word: sum(each.phases_ns[word] for each in group) / 1e9 * share for word in PHASES},
        min(each.first_ns for each in group),
    )


def _mean(cells: Sequence[Cell]) -> Cell:
    share = 1 / len(cells)
    return Cell(
        min(each.first for each in cells),
        sum(each.steps for each in cells) * share,
        sum(each.took_s for each in cells) * share,
        sum(each.work for each in cells),
        all(each.usual for each in cells),
        {word: sum(each.phases_s[word] for each in cells) * share for word in PHASES},
        min(each.began_ns for each in cells),
    )


def without_special(cell: Cell) -> Cell:
    """The steps without the time of their special phases."""
    special_s = sum(cell.phases_s[word] for word in UNUSUAL_PHASES)
    phases_s = {**cell.phases_s, **dict.fromkeys(UNUSUAL_PHASES, 0.0)}
    return cell._replace(took_s=cell.took_s - special_s, phases_s=phases_s, usual=True)
