"""Adds up the operators of a trace, and compares two ranks by them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

OUTSIDE = "outside of operators: Python, input, waits"
_STEP = "ProfilerStep#"
# Categories of torch's traces: what the host calls, and what devices do.
_ON_HOST = ("cpu_op", "user_annotation")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Row(NamedTuple):
    """One operator."""

    name: str
    times_s: tuple[float, ...]
    """Of each rank: its own time in a step, without what it calls."""
    calls: tuple[float, ...]
    """Of each rank: how often it is called in a step."""
    on_device: bool

    @property
    def difference_s(self) -> float:
        """By how much the first rank takes longer than the second; its time where it is alone."""
        return self.times_s[0] - (self.times_s[1] if len(self.times_s) > 1 else 0.0)


class Totals(NamedTuple):
    """The operators of one trace, for each step."""

    step_s: float
    own: Mapping[tuple[str, bool], float]
    calls: Mapping[tuple[str, bool], float]


def totals_of(trace: Any) -> Totals:
    """What a trace says. A part that is no event is left out."""
    found = trace.get("traceEvents") if isinstance(trace, Mapping) else trace
    events = [event for each in found if (event := _event(each))] if isinstance(found, list) else []
    steps = [each for each in events if each.name.startswith(_STEP)]
    count = len(steps) or 1
    # The step before these made the profiler ready.
    first_us = min((each.at_us for each in steps), default=0.0)
    events = [each for each in events if each.at_us >= first_us]
    own: defaultdict[tuple[str, bool], float] = defaultdict(float)
    calls: defaultdict[tuple[str, bool], float] = defaultdict(float)
    threads: defaultdict[Any, list[_Event]] = defaultdict(list)
    for each in events:
        if each.on_device:
            own[each.name, True] += each.took_us / 1e6 / count
            calls[each.name, True] += 1 / count
        elif not each.name.startswith(_STEP):
            threads[each.thread].append(each)
            calls[each.name, False] += 1 / count
    for thread, those in threads.items():
        covered_us = 0.0
        for event, own_us, outermost_us in _own_times(those):
            own[event.name, False] += own_us / 1e6 / count
            covered_us += outermost_us
        if steps and thread == steps[0].thread:
            outside_us = sum(each.took_us for each in steps) - covered_us
            own[OUTSIDE, False] = max(0.0, outside_us) / 1e6 / count
    step_s = sum(each.took_us for each in steps) / 1e6 / count
    return Totals(step_s, own, calls)


def compared(ranks: Sequence[Totals]) -> list[Row]:
    """A row for each operator, those first whose times differ most between the first two ranks."""
    keys = {key for each in ranks for key in each.own}
    rows = [
        Row(
            key[0],
            tuple(each.own.get(key, 0.0) for each in ranks),
            tuple(each.calls.get(key, 0.0) for each in ranks),
            key[1],
        )
        for key in keys
    ]
    return sorted(rows, key=lambda row: (-abs(row.difference_s), row.name))


class _Event(NamedTuple):
    name: str
    thread: Any
    at_us: float
    took_us: float
    on_device: bool


def _event(each: Any) -> _Event | None:
    if not isinstance(each, Mapping) or each.get("ph") != "X":
        return None
    name, category = each.get("name"), each.get("cat")
    at_us, took_us = each.get("ts"), each.get("dur")
    if category not in (*_ON_HOST, *_ON_DEVICE) or not isinstance(name, str):
        return None
    if not isinstance(at_us, (int, float)) or not isinstance(took_us, (int, float)):
        return None
    thread = str(each.get("pid")), str(each.get("tid"))
    return _Event(name, thread, float(at_us), float(took_us), category in _ON_DEVICE)


def _own_times(events: Iterable[_Event]) -> Iterable[tuple[_Event, float, float]]:
    """Each event of a thread with its time without those inside it, and if it is in no other, its
    whole time."""
    # The longer of two that begin together is around the other.
    ordered = sorted(events, key=lambda each: (each.at_us, -each.took_us))
    own_us = [each.took_us for each in ordered]
    outermost_us = [0.0] * len(ordered)
    around: list[tuple[int, float]] = []
    for at, each in enumerate(ordered):
        end_us = each.at_us + each.took_us
        while around and around[-1][1] <= each.at_us:
            around.pop()
        if around:
            # What is cut off by the end of the one around it belongs to no operator twice.
            inside_us = min(end_us, around[-1][1]) - each.at_us
            own_us[around[-1][0]] -= inside_us
            own_us[at] = inside_us
            end_us = min(end_us, around[-1][1])
        else:
            outermost_us[at] = each.took_us
        around.append((at, end_us))
    return zip(ordered, own_us, outermost_us, strict=True)
