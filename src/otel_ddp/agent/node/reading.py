"""One number that was read of the node, before anyone has said whose it is."""

from __future__ import annotations

from typing import NamedTuple

from otel_ddp.catalog import Metric


class Reading(NamedTuple):
    """The labels of the node, the run or the rank are put before these attributes later on."""

    metric: Metric
    value: float
    attributes: tuple[tuple[str, str], ...] = ()
    start_ns: int = 0
    """Since when a counter counts, in nanoseconds since 1970; 0 for what counts nothing."""
