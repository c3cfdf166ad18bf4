"""The straggler rule: when a rank or node is late, and when it no longer is.

`limits` has the thresholds; `cases` applies the rule every STRIDE steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.phase_table import PhaseTable, some_of
from otel_ddp.diagnosis.straggler.window import ExcessHistory

# For each of LENGTHS: the length, the strides in it, and in how many of its steps a late rank or
# node must at least be slower than the others.
_LEAST_ABOVE = [
    (length, length // limits.STRIDE, length / 2 + limits.SIGMAS * length**0.5 / 2)
    for length in limits.LENGTHS
]


def late_over(history: ExcessHistory, i: int, table: Callable[[int], PhaseTable]) -> int | None:
    """Whether unit *i* is late: over how many of the last steps it shows; None if it is not late.

    *table*: returns the phase table of this many last steps.
    """
    for length in _lengths_often_above(history, i):
        if _stands_out(history, i, length) and _is_among_slowest(table(length), i):
            return length
    return None


def is_over(history: ExcessHistory, i: int, length: int) -> bool:
    """Whether a rank or node that was late over *length* steps has recovered."""
    length = max(length, history.soon)
    return len(history) >= length and _is_low(history, history.excess_ns(i, length))


def is_alike_no_more(nodes: ExcessHistory, i: int) -> bool:
    """Whether a rank of a late node has recovered, so that the node as a whole is no longer late.

    Uses the longest of LENGTHS, because a single rank varies more than the median of a node.
    """
    length = limits.LENGTHS[-1]
    if len(nodes) < length:
        return False
    each_ns = nodes.rank_excesses_ns(i, nodes.units[i].members, length)
    return any(_is_low(nodes, excess_ns) for excess_ns in each_ns)


def _is_low(history: ExcessHistory, excess_ns: Sequence[float]) -> bool:
    step_ns = median(history.window.steps_ns(len(excess_ns)))
    limit_ns = max(limits.EXCESS_OVER * step_ns, limits.EXCESS_OVER_NS)
    return all(each < limit_ns for each in _window_medians(excess_ns))


def is_alike(nodes: ExcessHistory, i: int, length: int) -> bool:
    """Whether all ranks of node *i* are late by similar amounts."""
    least_ns = limits.NODE_ALIKE * median(nodes.excess_ns(i, length))
    each_ns = list(map(median, nodes.rank_excesses_ns(i, nodes.units[i].members, length)))
    return 0 < max(least_ns, limits.NODE_OF_LATEST * max(each_ns)) <= min(each_ns)


def is_apart(nodes: ExcessHistory, i: int, length: int, late: Collection[int]) -> bool:
    """Whether hardly any rank on other nodes is as late as the ranks of node *i*. Other late nodes,
    *late*, are left out."""
    node = nodes.units[i]
    alike = [unit for j, unit in enumerate(nodes.units) if j not in late]
    others = [at for unit in alike if unit.stage == node.stage for at in unit.members]
    if len(node.members) > limits.NODE_OUTNUMBERS * len(others):
        return False
    line_ns = limits.NODE_ALIKE * median(nodes.excess_ns(i, length))
    some = [others[at] for at in some_of(len(others))]
    each_ns = nodes.rank_excesses_ns(i, some, length)
    return sum(median(ns) >= line_ns for ns in each_ns) <= limits.NODE_OTHERS * len(some)


def may_be_its_node(nodes: ExcessHistory, i: int, length: int) -> bool:
    """Whether the whole node *i* seems to be late, so that the verdict on a rank of it should
    wait."""
    if len(nodes.units[i].members) == 1:
        return False
    least_ns = limits.EXCESS_PER_WINDOW * median(nodes.window.steps_ns(length))
    return median(nodes.excess_ns(i, length)) > least_ns and is_alike(nodes, i, length)


def least_excess_ns(step_ns: float) -> float:
    """The least excess with which a verdict opens."""
    return max(limits.EXCESS * step_ns, limits.EXCESS_NS)


def _lengths_often_above(history: ExcessHistory, i: int) -> list[int]:
    """The numbers of last steps (LENGTHS, or fewer if steps are slow) in which unit *i* is above
    the others too often for chance.

    This check is cheap and nearly always finds nothing, so it comes before the others.
    """
    counts, found = history.above[i], []
    if (far := history.far_above(i)) >= limits.SOON_FEWEST and far >= (soon := history.soon):
        found = [soon] if _is_far_out(history, i, soon) else []
    return found + [
        length
        for length, strides, enough in _LEAST_ABOVE
        if sum(counts[-strides:]) >= enough and len(counts) >= strides
    ]


def _stands_out(history: ExcessHistory, i: int, length: int) -> bool:
    excess_ns = history.excess_ns(i, length)
    step_ns = median(history.window.steps_ns(length))
    if median(excess_ns) <= least_excess_ns(step_ns):
        return False
    least_mean_ns = max(limits.EXCESS_PER_WINDOW * step_ns, limits.ALIKE * median(excess_ns))
    if _mean_without_pauses(excess_ns, history.waits_ns(i, length)) <= least_mean_ns:
        return False
    each_ns = _window_medians(excess_ns)
    # If one window is far below another, the rank became late within these steps. Then wait: the
    # steps before would blur the phase in which it is late.
    return min(each_ns) > max(limits.EXCESS_PER_WINDOW * step_ns, limits.ALIKE * max(each_ns))


def _is_far_out(history: ExcessHistory, i: int, length: int) -> bool:
    """Whether the excess of unit *i* is several of its own standard deviations above zero."""
    excess_ns = history.excess_ns(i, limits.LENGTHS[0])
    # Estimate the standard deviation from the median absolute deviation, which outliers don't
    # change: in a normal distribution, it is 0.674 standard deviations.
    middle_ns = median(excess_ns)
    deviation_ns = median([abs(ns - middle_ns) for ns in excess_ns]) / 0.674
    return min(_window_medians(excess_ns[-length:])) > limits.SOON_SIGMAS * deviation_ns


def _mean_without_pauses(excess_ns: Sequence[float], waits_ns: Sequence[float]) -> float:
    """The mean excess without rare pauses. It is low if a rank is slow in some steps and fast in
    others.

    A rank's own pauses do not make it late, and its waits for pauses of other ranks do not make it
    fast, so neither count.
    """
    order = sorted(range(len(excess_ns)), key=excess_ns.__getitem__)
    few = int(limits.PAUSES * len(order))
    highest = excess_ns[order[-few - 1]]
    own_ns = sum(excess_ns[at] - highest for at in order[len(order) - few :])
    waited_ns = sum(max(min(waits_ns[at], -excess_ns[at]), 0.0) for at in order[:few])
    return (sum(excess_ns) - own_ns + waited_ns) / len(order)


def _window_medians(excess_ns: Sequence[float]) -> list[float]:
    length = len(excess_ns)
    bounds = [length * i // limits.WINDOWS for i in range(limits.WINDOWS + 1)]
    return [median(excess_ns[start:end]) for start, end in pairwise(bounds)]


def _is_among_slowest(table: PhaseTable, i: int) -> bool:
    """Whether unit *i* is slower than the slower half of the others.

    Without this check, one fast rank of three would make the other two late.
    """
    others_s = sorted(table.others_work_s(i))
    slower_s = others_s[len(others_s) // 2]
    return table.work_s(i) - slower_s > limits.EXCESS_PER_WINDOW * table.step_s
