"""One number that a source has read, not yet assigned to a rank, a run or the node."""

from __future__ import annotations

from typing import NamedTuple

from otel_ddp.catalog import Metric


class Measurement(NamedTuple):
    """The labels of the node, the run or the rank are prepended to these attributes later."""

    metric: Metric
    value: float
    attributes: tuple[tuple[str, str], ...] = ()
    start_ns: int = 0
    """Since when a counter counts, in nanoseconds since 1970; 0 if it is not a counter."""
