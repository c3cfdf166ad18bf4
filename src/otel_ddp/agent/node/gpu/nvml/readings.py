"""Makes readings of NVML's numbers, in our units, and leaves out those that cannot be."""

from __future__ import annotations

from otel_ddp import catalog
from otel_ddp.agent.node.reading import Reading
from otel_ddp.catalog import Metric

_MOST_WATTS = 20_000.0
_COLDEST_CELSIUS = -60.0
_HOTTEST_CELSIUS = 200.0
# NVML's "not available" is all ones, which must be beyond the bound: in 64 bits, and in 32.
_MOST_COUNTED = 2.0**63
_MOST_EVENTS = 2.0**32 - 2

Attributes = tuple[tuple[str, str], ...]


class Readings:
    """Counts what was impossible, and keeps what is to be said of it, each sentence once."""

    def __init__(self, loaded_ns: int) -> None:
        """`loaded_ns` is since when the driver has counted, as near as that is known."""
        self._loaded_ns = loaded_ns
        self.impossible = 0
        self.remarks: dict[str, None] = {}

    def gauge(
        self,
        metric: Metric,
        value: float,
        attributes: Attributes = (),
        *,
        at_least: float = 0.0,
        at_most: float,
        start_ns: int = 0,
    ) -> tuple[Reading, ...]:
        """The reading, or none where the number is beyond its bounds."""
        # NaN is within none.
        if at_least <= value <= at_most:
            return (Reading(metric, value, attributes, start_ns),)
        self.impossible += 1
        self.remark(f"NVML gives impossible values of {metric.name}: they are left out.")
        return ()

    def remark(self, sentence: str) -> None:
        self.remarks[sentence] = None

    def counter(
        self, metric: Metric, value: float, attributes: Attributes = (), *, unit: float = 1.0
    ) -> tuple[Reading, ...]:
        """Something that the driver measures, in so many of our units."""
        return self.gauge(
            metric,
            value * unit,
            attributes,
            at_most=_MOST_COUNTED * unit,
            start_ns=self._loaded_ns,
        )

    def events(
        self, metric: Metric, value: float, attributes: Attributes = ()
    ) -> tuple[Reading, ...]:
        """Something that the driver counts one by one."""
        return self.gauge(metric, value, attributes, at_most=_MOST_EVENTS, start_ns=self._loaded_ns)

    def power(self, metric: Metric, milliwatts: float) -> tuple[Reading, ...]:
        return self.gauge(metric, milliwatts / 1000, at_most=_MOST_WATTS)

    def temperature(self, where: str, celsius: float) -> tuple[Reading, ...]:
        return self.gauge(
            catalog.HW_TEMPERATURE,
            celsius,
            (("hw.sensor_location", where),),
            at_least=_COLDEST_CELSIUS,
            at_most=_HOTTEST_CELSIUS,
        )

    def throttled(self, reason: str, nanoseconds: float) -> tuple[Reading, ...]:
        attributes = (("reason", reason),)
        return self.counter(catalog.GPU_THROTTLE_DURATION, nanoseconds, attributes, unit=1e-9)
