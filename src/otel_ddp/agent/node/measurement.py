"""One number that a source has read, not yet assigned to a rank, a run or the node."""

from __future__ import annotations

import time
from typing import NamedTuple

from otel_ddp.catalog import Metric

_NS_PER_S = 1_000_000_000


class Measurement(NamedTuple):
    """The labels of the node, the run or the rank are prepended to these attributes later."""

    metric: Metric
    value: float
    attributes: tuple[tuple[str, str], ...] = ()
    start_ns: int = 0
    """Since when a counter counts, in nanoseconds since 1970; 0 if it is not a counter."""


def boot_ns() -> int:
    """When the machine was started, in nanoseconds since 1970.

    To the second: a counter's start must not move when the clock is corrected a little.
    """
    boottime = time.CLOCK_BOOTTIME
    # Of three, since a pause between the two clocks makes it earlier.
    found_ns = max(time.time_ns() - time.clock_gettime_ns(boottime) for _ in range(3))
    return round(found_ns / _NS_PER_S) * _NS_PER_S
