"""The straggler rule: when a rank counts as late, and when it no longer does.

`limits` has all thresholds; `detector` applies the rule to the ranks of a run, every STRIDE steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from otel_ddp.diagnosis.medians import median, without
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.excess_history import ExcessHistory
from otel_ddp.diagnosis.straggler.phase_table import PhaseTable

# Length, strides in it, and the steps above the others that it takes.
_OFTEN = [
    (length, length // limits.STRIDE, length / 2 + limits.SIGMAS * length**0.5 / 2)
    for length in limits.LENGTHS
]


def late_over(history: ExcessHistory, i: int, table: Callable[[int], PhaseTable]) -> int | None:
    """Over how many of the last steps rank *i* counts as late; None where it does not.

    *table* gives the phases of so many last steps.
    """
    for length in _lengths_often_above(history, i):
        if _stands_out(history, i, length):
            phases = table(length)
            if _is_among_slowest(phases.work_s, i, phases.step_s):
                return length
    return None


def is_over(history: ExcessHistory, i: int, length: int) -> bool:
    """Whether a rank that was late over *length* steps no longer is."""
    if len(history) < length:
        return False
    step_ns = median(history.steps_ns(length))
    limit_ns = max(limits.EXCESS_OVER * step_ns, limits.EXCESS_OVER_NS)
    return all(each < limit_ns for each in _window_medians(history.excess_ns(i, length)))


def least_excess_ns(step_ns: float) -> float:
    """The excess above which a rank may be named."""
    return max(limits.EXCESS * step_ns, limits.EXCESS_NS)


def _lengths_often_above(history: ExcessHistory, i: int) -> list[int]:
    """The lengths over which chance cannot explain it: nearly always none, and cheap to see."""
    counts = history.above_counts(i)
    return [
        length
        for length, strides, enough in _OFTEN
        if sum(counts[-strides:]) >= enough and len(counts) >= strides
    ]


def _stands_out(history: ExcessHistory, i: int, length: int) -> bool:
    excess_ns = history.excess_ns(i, length)
    step_ns = median(history.steps_ns(length))
    if median(excess_ns) <= least_excess_ns(step_ns):
        return False
    least_mean_ns = max(limits.EXCESS_PER_WINDOW * step_ns, limits.ALIKE * median(excess_ns))
    if _mean_without_pauses(excess_ns, history.waits_ns(i, length)) <= least_mean_ns:
        return False
    each_ns = _window_medians(excess_ns)
    # Where one window is far below another, it began within these steps: its phase would be
    # blurred.
    return min(each_ns) > max(limits.EXCESS_PER_WINDOW * step_ns, limits.ALIKE * max(each_ns))


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
    window = length // limits.WINDOWS
    return [median(excess_ns[start : start + window]) for start in range(0, length, window)]


def _is_among_slowest(work_s: Sequence[float], i: int, step_s: float) -> bool:
    """Slower than the slower half of the others too: of three, one is fast rather than two slow."""
    others = sorted(without(work_s, i))
    return work_s[i] - others[len(others) // 2] > limits.EXCESS_PER_WINDOW * step_s
