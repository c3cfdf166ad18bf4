"""Turns NVML's numbers into measurements in our units, and drops impossible ones."""

from __future__ import annotations

from otel_ddp import catalog
from otel_ddp.agent.node.measurement import Measurement
from otel_ddp.catalog import Metric

_MOST_WATTS = 20_000.0
_COLDEST_CELSIUS = -60.0
_HOTTEST_CELSIUS = 200.0
# NVML's "not available" is all ones: that must exceed these bounds, in 64 bits and in 32.
_MOST_COUNTED = 2.0**63
_MOST_EVENTS = 2.0**32 - 2

Attributes = tuple[tuple[str, str], ...]


class Measurements:
    """Counts impossible numbers, and keeps one sentence about each metric that had one."""

    def __init__(self, loaded_ns: int) -> None:
        """*loaded_ns*: about since when the driver has counted."""
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
    ) -> tuple[Measurement, ...]:
        """The measurement; none if the number is beyond its bounds."""
        # NaN is within no bounds.
        if at_least <= value <= at_most:
            return (Measurement(metric, value, attributes, start_ns),)
        self.impossible += 1
        self.remark(f"NVML gives impossible values of {metric.name}: they are left out.")
        return ()

    def remark(self, sentence: str) -> None:
        self.remarks[sentence] = None

    def counter(
        self, metric: Metric, value: float, attributes: Attributes = (), *, unit: float = 1.0
    ) -> tuple[Measurement, ...]:
        """A quantity that the driver adds up; *unit*: its unit in ours."""
        return self.gauge(
            metric,
            value * unit,
            attributes,
            at_most=_MOST_COUNTED * unit,
            start_ns=self._loaded_ns,
        )

    def events(
        self, metric: Metric, value: float, attributes: Attributes = ()
    ) -> tuple[Measurement, ...]:
        """Events that the driver counts."""
        return self.gauge(metric, value, attributes, at_most=_MOST_EVENTS, start_ns=self._loaded_ns)

    def power(self, metric: Metric, milliwatts: float) -> tuple[Measurement, ...]:
        return self.gauge(metric, milliwatts / 1000, at_most=_MOST_WATTS)

    def temperature(self, where: str, celsius: float) -> tuple[Measurement, ...]:
        return self.gauge(
            catalog.HW_TEMPERATURE,
            celsius,
            (("hw.sensor_location", where),),
            at_least=_COLDEST_CELSIUS,
            at_most=_HOTTEST_CELSIUS,
        )

    def throttled(self, reason: str, nanoseconds: float) -> tuple[Measurement, ...]:
        attributes = (("reason", reason),)
        return self.counter(
            catalog.OTEL_DDP_GPU_THROTTLE_DURATION, nanoseconds, attributes, unit=1e-9
        )
