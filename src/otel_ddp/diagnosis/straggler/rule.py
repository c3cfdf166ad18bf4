"""The straggler rule: when a rank or a node counts as late, and when it no longer does.

`limits` has all thresholds; `cases` applies the rule to the ranks and nodes of a run, every STRIDE
steps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from otel_ddp.diagnosis.medians import median, spread
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.phase_table import PhaseTable, some_of
from otel_ddp.diagnosis.straggler.window import ExcessHistory

# Length, strides in it, and the steps above the others that it takes.
_OFTEN = [
    (length, length // limits.STRIDE, length / 2 + limits.SIGMAS * length**0.5 / 2)
    for length in limits.LENGTHS
]


def late_over(history: ExcessHistory, i: int, table: Callable[[int], PhaseTable]) -> int | None:
    """Over how many of the last steps unit *i* counts as late; None where it does not.

    *table* gives the phases of so many last steps.
    """
    for length in _lengths_often_above(history, i):
        if _stands_out(history, i, length) and _is_among_slowest(table(length), i):
            return length
    return None


def is_over(history: ExcessHistory, i: int, length: int) -> bool:
    """Whether a unit that was late over *length* steps no longer is."""
    length = max(length, history.soon)
    return len(history) >= length and _is_low(history, history.excess_ns(i, length))


def is_alike_no_more(nodes: ExcessHistory, i: int) -> bool:
    """Whether a rank of a late node is no longer late.

    One rank varies more than the median of several, so this takes the longest length.
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
    """Whether all ranks of node *i* are late, as far as it is."""
    least_ns = limits.NODE_ALIKE * median(nodes.excess_ns(i, length))
    each_ns = list(map(median, nodes.rank_excesses_ns(i, nodes.units[i].members, length)))
    return 0 < max(least_ns, limits.NODE_OF_LATEST * max(each_ns)) <= min(each_ns)


def is_apart(nodes: ExcessHistory, i: int, length: int, late: Collection[int]) -> bool:
    """Whether hardly any rank on nodes that are not *late* is late as the ranks of node *i* are."""
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
    """Whether a rank that is late may be so as all of its node *i* is, which shows soon."""
    if len(nodes.units[i].members) == 1:
        return False
    least_ns = limits.EXCESS_PER_WINDOW * median(nodes.window.steps_ns(length))
    return median(nodes.excess_ns(i, length)) > least_ns and is_alike(nodes, i, length)


def least_excess_ns(step_ns: float) -> float:
    """The excess above which a rank may be named."""
    return max(limits.EXCESS * step_ns, limits.EXCESS_NS)


def _lengths_often_above(history: ExcessHistory, i: int) -> list[int]:
    """The lengths over which chance cannot explain it: nearly always none, and cheap to see."""
    counts, found = history.above_counts(i), []
    # How many steps are enough is asked for those few that are far above.
    if (far := history.far_above(i)) >= limits.SOON_FEWEST and far >= (soon := history.soon):
        found = [soon] if _is_far_out(history, i, soon) else []
    return found + [
        length
        for length, strides, enough in _OFTEN
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
    # Where one window is far below another, it began within these steps: its phase would be
    # blurred.
    return min(each_ns) > max(limits.EXCESS_PER_WINDOW * step_ns, limits.ALIKE * max(each_ns))


def _is_far_out(history: ExcessHistory, i: int, length: int) -> bool:
    """Whether unit *i* is further above the others than it ever moves by itself."""
    excess_ns = history.excess_ns(i, limits.LENGTHS[0])
    # Of a normal distribution, the median distance from the middle is 0.674 standard deviations.
    deviation_ns = spread(excess_ns) / 0.674
    return min(_window_medians(excess_ns[-length:])) > limits.SOON_SIGMAS * deviation_ns


def _mean_without_pauses(excess_ns: Sequence[float], waits_ns: Sequence[float]) -> float:
    """The mean excess: a rank that makes up in some steps for what it needs in others is not late.

    Its own pauses make no rank late. A pause of another rank makes up for nothing: this rank waits
    for it. Either kind is rare.
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
    """Slower than the slower half of the others too: of three, one is fast rather than two slow."""
    others_s = sorted(table.others_work_s(i))
    slower_s = others_s[len(others_s) // 2]
    return table.work_s(i) - slower_s > limits.EXCESS_PER_WINDOW * table.step_s
