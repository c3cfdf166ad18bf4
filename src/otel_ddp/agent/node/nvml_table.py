"""All metrics that are read from a GPU, with their units and NVML calls.

To read another metric, add a row. Of several ways to read a series, the first one that the GPU
supports is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from otel_ddp.agent.node.source import Measurement
from otel_ddp.vocabulary import catalog

U32 = 0xFFFF_FFFF
_ALL_LINKS = U32


class Unit(NamedTuple):
    """A unit of NVML: how many of it make one of our units, and NVML's valid range.

    NVML sets all bits for "not available"; this value is outside of the range.
    """

    per: float = 1.0
    most: float = 2.0**63
    least: float = 0.0


_PERCENT = Unit(100, 100)
_ROUNDED_PERCENT = Unit(100, 101)
_YES = Unit(most=1)
_CELSIUS = Unit(most=200, least=-60)
_MILLIWATTS = Unit(1000, 20_000_000)
_MILLIJOULES, _NANOSECONDS, _MEGAHERTZ = Unit(1000), Unit(1e9), Unit(1e-6, 100_000)
_MEMORY, _SIZE = Unit(most=2**50), Unit(most=2**50, least=1)
_BYTES = Unit()
_EVENTS = Unit(most=U32 - 1)
_LANES = Unit(most=64, least=1)


class Call(NamedTuple):
    """A function of NVML with its arguments."""

    function: tuple[Any, ...]
    part: str | int | None = None
    """The name or index of the value in the answer; None if the answer is the value."""
    bit: int = 0
    """If not 0, the answer is a bit mask, and the value is 1 if this bit is set."""

    def value(self, answer: Any) -> float:
        """Extract the value from an answer."""
        if self.bit:
            # Masks have 32 bits. A larger value, with all 64 bits set, means "not available".
            return bool(answer & self.bit) if answer <= U32 else math.nan
        if isinstance(self.part, str):
            return float(getattr(answer, self.part))
        return float(answer if self.part is None else answer[self.part])


class Field(NamedTuple):
    """A value that NVML reads by field id. *number*: the id. *scope*: the number of the NVLink."""

    number: int
    scope: int = 0
    wide: bool = False
    """Whether to ignore this field if it has 32 bits only: it would overflow in a second."""


class Fields(NamedTuple):
    """A value that is the sum of several fields."""

    fields: tuple[Field, ...]
    links: bool = False
    """Whether to sum over all links."""
    times: int = 1


class Gpm(NamedTuple):
    """A metric of GPM, for the time between two samples."""

    number: int
    counts: bool = False
    """Whether the metric is a rate in MiB/s that is integrated to bytes."""


Way = Call | Fields | Gpm
Ways = Mapping[str, Sequence[Way]]
"""The ways to read each series of a metric, by the value of the metric's last attribute."""


class Row(NamedTuple):
    """One metric: its unit, and the ways to read its series."""

    metric: catalog.Metric
    unit: Unit
    series: Ways

    def measurement(self, word: str, raw: float, pci: str, start_ns: int) -> Measurement:
        """The measurement in our unit; its value is NaN if *raw* is outside the bounds."""
        per, most, least = self.unit
        value = raw / per if least <= raw <= most else math.nan
        if self.metric.unit == "1":
            value = min(value, 1.0)  # NaN stays NaN
        names = self.metric.attributes
        of_board = [("pci", pci)] if "pci" in names else []
        of_word = [(names[-1], word)] if word else []
        return Measurement(self.metric, value, (*of_board, *of_word), start_ns)


def _get(name: str, *arguments: int, part: str | int | None = None, bit: int = 0) -> Call:
    return Call((f"nvmlDeviceGet{name}", *arguments), part, bit)


def _sum(*numbers: int, links: bool = False, wide: bool = False) -> Fields:
    return Fields(tuple(Field(number, wide=wide) for number in numbers), links)


def _memory(part: str) -> list[Way]:
    # Try version 2 of the call first: its "used" does not include the memory of the driver itself.
    return [_get("MemoryInfo", 0x0200_0028, part=part), _get("MemoryInfo", part=part)]


_REASONS = {
    "application_clocks": 0x002,
    "sw_power": 0x004,
    "hw_slowdown": 0x008,
    "sync_boost": 0x010,
    "sw_thermal": 0x020,
    "hw_thermal": 0x040,
    "hw_power_brake": 0x080,
    "display_clock": 0x100,
}


def _reason(bit: int) -> list[Way]:
    # Drivers before version 535 know the function only by its second name.
    names = "CurrentClocksEventReasons", "CurrentClocksThrottleReasons"
    return [_get(name, bit=bit) for name in names]


# Ids of the fields that count for how many nanoseconds clocks were lowered, by reason. The fields
# for finer thermal reasons are not read: their ids, 251 and up, differ between driver branches.
_DURATIONS = {
    "sw_power": 74,
    "thermal": 75,
    "sync_boost": 76,
    "board_limit": 77,
    "reliability": 79,
}
# Selects the counter that begins when the driver is loaded. NVML's other counter covers the GPU's
# lifetime, but the driver stores it late and incompletely.
_SINCE_LOADED = 0
_CORRECTED, _UNCORRECTED = 0, 1
_ENGINES = {"sm": 2, "tensor": 5, "dram": 10, "fp64": 11, "fp32": 12, "fp16": 13}

_BUSY: Ways = {
    "general": [_get("UtilizationRates", part="gpu")],
    "encoder": [_get("EncoderUtilization", part=0)],
    "decoder": [_get("DecoderUtilization", part=0)],
}
_CONTROLLER: Ways = {"": [_get("UtilizationRates", part="memory")]}
_TEMPERATURES: Ways = {
    # In CUDA 14, the second call replaces the first.
    "core": [_get("Temperature", 0), _get("TemperatureV", 0)],
    "memory": [_sum(82)],
}
_CLOCKS: Ways = {"core": [_get("ClockInfo", 1)], "memory": [_get("ClockInfo", 2)]}
_ACTIVE: Ways = {reason: _reason(bit) for reason, bit in _REASONS.items()}
_DURATION: Ways = {reason: [_sum(field)] for reason, field in _DURATIONS.items()}
_GPM: Ways = {engine: [Gpm(number)] for engine, number in _ENGINES.items()}
_PCIE: Ways = {
    "transmit": [Gpm(20, counts=True), _sum(197, wide=True)],
    "receive": [Gpm(21, counts=True), _sum(198, wide=True)],
}
_NVLINK: Ways = {
    # The first field has the KiB of all links. NVLink 5 does not have it: sum the bytes of each
    # link there.
    "transmit": [Fields((Field(138, _ALL_LINKS),), times=1024), _sum(202, links=True)],
    "receive": [Fields((Field(139, _ALL_LINKS),), times=1024), _sum(204, links=True)],
}
_NVLINK_ERRORS: Ways = {
    "": [
        # Checksum errors of control packets and of data packets, replays, and recoveries.
        _sum(38, 45, 52, 59),
        # For GPUs without these totals: the same errors, summed over the links.
        _sum(161, 162, 163, links=True),
        # For NVLink 5: damaged packets, integrity failures, and recoveries.
        _sum(208, 211, 215, links=True),
    ]
}
_ECC: Ways = {
    "corrected": [_get("TotalEccErrors", _CORRECTED, _SINCE_LOADED)],
    "uncorrected": [_get("TotalEccErrors", _UNCORRECTED, _SINCE_LOADED)],
}
_REMAPPED: Ways = {
    "corrected": [_get("RemappedRows", part=0)],
    "uncorrected": [_get("RemappedRows", part=1)],
}
_WIDTHS: Ways = {"current": [_get("CurrPcieLinkWidth")], "max": [_get("MaxPcieLinkWidth")]}
_POWER: Ways = {"": [_sum(186), _get("PowerUsage")]}

ROWS = (
    Row(catalog.HW_GPU_UTILIZATION, _PERCENT, _BUSY),
    Row(catalog.OTEL_DDP_GPU_MEM_CONTROLLER_UTILIZATION, _PERCENT, _CONTROLLER),
    Row(catalog.HW_GPU_MEMORY_USAGE, _MEMORY, {"": _memory("used")}),
    Row(catalog.HW_GPU_MEMORY_LIMIT, _SIZE, {"": _memory("total")}),
    Row(catalog.HW_TEMPERATURE, _CELSIUS, _TEMPERATURES),
    Row(catalog.HW_POWER, _MILLIWATTS, _POWER),
    Row(catalog.OTEL_DDP_GPU_CLOCK_FREQUENCY, _MEGAHERTZ, _CLOCKS),
    Row(catalog.OTEL_DDP_GPU_THROTTLE_ACTIVE, _YES, _ACTIVE),
    Row(catalog.OTEL_DDP_GPU_ENGINE_ACTIVE, _ROUNDED_PERCENT, _GPM),
    Row(catalog.HW_GPU_IO, _BYTES, _PCIE),
    Row(catalog.OTEL_DDP_GPU_NVLINK_IO, _BYTES, _NVLINK),
    Row(catalog.OTEL_DDP_GPU_NVLINK_ERRORS, Unit(), _NVLINK_ERRORS),
    Row(catalog.OTEL_DDP_GPU_THROTTLE_DURATION, _NANOSECONDS, _DURATION),
    Row(catalog.HW_ENERGY, _MILLIJOULES, {"": [_get("TotalEnergyConsumption")]}),
    Row(catalog.OTEL_DDP_GPU_POWER_LIMIT, _MILLIWATTS, {"": [_get("EnforcedPowerLimit")]}),
    Row(catalog.HW_ERRORS, _EVENTS, _ECC),
    Row(catalog.OTEL_DDP_GPU_REMAPPED_ROWS, _EVENTS, _REMAPPED),
    Row(catalog.OTEL_DDP_GPU_PCIE_REPLAYS, _EVENTS, {"": [_get("PcieReplayCounter")]}),
    Row(catalog.OTEL_DDP_GPU_PCIE_LINK_WIDTH, _LANES, _WIDTHS),
)
