"""Turns totals into what was added since the last export, where delta temporality is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal
from weakref import WeakKeyDictionary

from otel_ddp.agent.ledger import Buckets, Series
from otel_ddp.catalog import Kind

Preference = Literal["cumulative", "delta", "lowmemory"]

# Ours all come from totals, which the specification calls asynchronous: their counters stay
# cumulative with "lowmemory". Up-down counters stay so always.
_KINDS: Mapping[Preference, frozenset[Kind]] = {
    "cumulative": frozenset(),
    "delta": frozenset({Kind.COUNTER, Kind.HISTOGRAM}),
    "lowmemory": frozenset({Kind.HISTOGRAM}),
}
# A series that began longer ago was exported by an earlier agent, for all this one knows: what was
# added before the first export is not told twice.
_NEW_NS = 60 * 10**9


class Deltas:
    """Remembers, for each series, what was exported last."""

    def __init__(self, preference: Preference, began_ns: int) -> None:
        """*began_ns*: when this agent began."""
        self._kinds = _KINDS[preference]
        self._began_ns = began_ns
        self._last: WeakKeyDictionary[Series, tuple[float | Buckets, int, int]] = (
            WeakKeyDictionary()
        )

    def applies_to(self, kind: Kind) -> bool:
        """Whether points of this kind are deltas."""
        return kind in self._kinds

    def take(self, series: Series, now_ns: int) -> tuple[float | Buckets, int] | None:
        """What was added, and since when; None where that is not known."""
        value, start_ns = series.value, series.start_ns
        if value is None:
            return None
        last = self._last.get(series)
        self._last[series] = (value, start_ns, now_ns)
        if last is None:
            return (value, start_ns) if start_ns > self._began_ns - _NEW_NS else None
        before, began_ns, exported_ns = last
        if start_ns != began_ns:
            # Another process has these labels now, and counts from its own beginning.
            return value, max(start_ns, exported_ns)
        return _added(value, before), exported_ns


def _added(value: float | Buckets, before: float | Buckets) -> float | Buckets:
    """The difference; the value itself where the total has begun anew."""
    if isinstance(value, Buckets) and isinstance(before, Buckets):
        counts = tuple(now - then for now, then in zip(value.counts, before.counts, strict=True))
        if min(counts, default=0) < 0:
            return value
        return value._replace(counts=counts, total=value.total - before.total)
    if isinstance(value, Buckets) or isinstance(before, Buckets) or value < before:
        return value
    return value - before
