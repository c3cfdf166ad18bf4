"""Adds up the operators of traces, compares the suspect with another, and names the culprit."""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, NamedTuple

from otel_ddp.history.terminal import printable, shown_s

OUTSIDE = "outside of operators: Python, input, waits"
IDLE = "idle"
_STEP = "ProfilerStep#"
# Categories of torch's traces: what the host calls, and what devices do.
_ON_HOST = ("cpu_op", "user_annotation")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
# Collectives: who takes longer in them has waited, and is late nowhere.
_WAITS = ("gloo:", "nccl", "c10d::")
# Of the step: what ranks differ by anyway.
_NOISE = 0.02


class Row(NamedTuple):
    """One operator, of all ranks."""

    name: str
    on_device: bool
    times_s: tuple[float, ...]
    """Of each rank: its own time in a step, without what it calls."""

    @property
    def other_s(self) -> float:
        """That of the second rank; 0 where there is none."""
        return self.times_s[1] if len(self.times_s) > 1 else 0.0

    @property
    def difference_s(self) -> float:
        """By how much the first rank takes longer than the second."""
        return self.times_s[0] - self.other_s

    def to_json(self) -> dict[str, Any]:
        """For `profile.json`."""
        told = self._asdict()
        return {"operator": told.pop("name"), **told, "difference_s": self.difference_s}

    @property
    def may_be_late(self) -> bool:
        return self.name != IDLE and not self.name.startswith(_WAITS)


class Totals(NamedTuple):
    """The operators of one trace, for each step: of the host, and of a device if there is one."""

    step_s: float
    own: Mapping[tuple[str, bool], float]
    """By name, and if it ran on the device. Either half adds up to the step."""


class _Event(NamedTuple):
    at_us: float
    end_us: float
    name: str
    lane: tuple[str, str]
    """A thread of the host, or a stream of a device."""
    on_device: bool


def _event(each: Mapping[str, Any]) -> _Event:
    at_us, lane = each["ts"], (str(each["pid"]), str(each["tid"]))
    return _Event(at_us, at_us + each["dur"], each["name"], lane, each["cat"] in _ON_DEVICE)


def totals_of(trace: Mapping[str, Any]) -> Totals:
    """What a trace says.

    Each moment of a step belongs to one operator: to the innermost of the thread that steps, else
    to one that runs in another thread meanwhile, as backward does for a device. A device's streams
    are taken the same way, the busiest first.
    """
    told = [each for each in trace["traceEvents"] if each.get("ph") == "X"]
    events = [_event(each) for each in told if each.get("cat") in (*_ON_HOST, *_ON_DEVICE)]
    steps = sorted(each for each in events if each.name.startswith(_STEP))
    own: defaultdict[tuple[str, bool], float] = defaultdict(float)
    if not steps:
        return Totals(0.0, own)
    # What made the profiler ready lies before the first step.
    rest = [e for e in events if not e.name.startswith(_STEP) and e.end_us > steps[0].at_us]
    for on_device, idle in ((False, OUTSIDE), (True, IDLE)):
        mine = [each for each in rest if each.on_device == on_device]
        if mine or not on_device:
            for name, us in _shares(steps, mine, idle):
                own[name, on_device] += us / 1e6 / len(steps)
    step_s = sum(each.end_us - each.at_us for each in steps) / 1e6 / len(steps)
    return Totals(step_s, own)


def _shares(
    steps: Sequence[_Event], events: Iterable[_Event], idle: str
) -> Iterator[tuple[str, float]]:
    """Piece by piece, which operator the time of the steps belongs to, and how long."""
    busy_us: defaultdict[tuple[str, str], float] = defaultdict(float)
    for each in events:
        busy_us[each.lane] += each.end_us - each.at_us
    lanes = sorted(busy_us, key=lambda lane: (lane != steps[0].lane, -busy_us[lane]))
    order = {lane: at for at, lane in enumerate(lanes)}
    waiting = deque(sorted(events))
    # The first is the innermost of the first lane; one that is over stays until it is the first.
    running: list[tuple[int, float, float, str]] = []
    starts = [each.at_us for each in steps]
    bounds = {moment for each in (*steps, *waiting) for moment in (each.at_us, each.end_us)}
    for at_us, until_us in pairwise(sorted(bounds)):
        while waiting and waiting[0].at_us <= at_us:
            each = waiting.popleft()
            heappush(running, (order[each.lane], -each.at_us, each.end_us, each.name))
        while running and running[0][2] <= at_us:
            heappop(running)
        step = bisect(starts, at_us) - 1
        if step >= 0 and at_us < steps[step].end_us:
            yield running[0][3] if running else idle, until_us - at_us


def compared(ranks: Sequence[Totals]) -> list[Row]:
    """A row for each operator; those in which the first rank differs most from the second first."""
    keys = {key for each in ranks for key in each.own}
    rows = [Row(*key, tuple(each.own.get(key, 0.0) for each in ranks)) for key in keys]
    return sorted(rows, key=lambda row: (-abs(row.difference_s), row.name))


def culprit(ranks: Sequence[int], step_s: float, rows: Iterable[Row]) -> str:
    """A sentence: the operator that explains why the first rank is late, or that none does."""
    if len(ranks) < 2:
        return ""
    suspect, other = f"rank {ranks[0]}", f"rank {ranks[1]}"
    slower = [row for row in rows if row.may_be_late and row.difference_s > 0]
    # A host waits for its device, so the device's difference comes first.
    for on_device in (True, False):
        mine = [row for row in slower if row.on_device == on_device]
        surplus_s = sum(row.difference_s for row in mine)
        if not mine or surplus_s < _NOISE * step_s:
            continue
        most = max(mine, key=lambda row: row.difference_s)
        name = printable(most.name) + (" on the device" if on_device else "")
        figures = f"{shown_s(most.times_s[0])} against {shown_s(most.other_s)}"
        if most.difference_s < surplus_s / 2:
            return (
                f"No single operator explains it: {suspect} needs {shown_s(surplus_s)} longer a "
                f"step in {len(mine)} operators than {other}, most of all in {name}: {figures}."
            )
        where = name if most.name == OUTSIDE else f"in {name}"
        return (
            f"{suspect.capitalize()} needs {shown_s(most.difference_s)} longer a step {where} "
            f"than {other}: {figures}."
        )
    return f"No operator explains it: in these steps {suspect} needs no longer than {other}."
