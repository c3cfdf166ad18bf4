"""All numbers that are read of a board: metric, period, unit, and how NVML is asked for them.

To read another one, add a row here. Of the ways of a series the first counts that a board has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from otel_ddp import catalog as c
from otel_ddp.agent.node.measurement import Measurement

MOVING_S, COUNTING_S, SETTLED_S = 1.0, 5.0, 10.0
U32 = 0xFFFF_FFFF


class Unit(NamedTuple):
    """How many of NVML's make one of ours, and NVML's bounds: its "not available" is all ones."""

    per: float = 1.0
    most: float = 2.0**63
    least: float = 0.0
    whole: float = math.inf
    """What exceeds it, within the bounds, counts as it."""


_PERCENT = Unit(100, 100)
_ROUNDED_PERCENT = Unit(100, 101, whole=100)
# A fan may turn faster than its nominal maximum.
_FAN_PERCENT = Unit(100, 200, whole=100)
_MILLIWATTS = Unit(1000, 20_000_000)
_MEGAHERTZ = Unit(1e-6, 100_000)
_EVENTS = Unit(most=U32 - 1)
_MIB_PER_S = Unit(1 / 2**20, 2**20)


class Call(NamedTuple):
    """A function of NVML with its arguments."""

    function: tuple[Any, ...]
    part: str | int | None = None
    """Of the answer: a name, or a place in it."""
    bit: int = 0
    """If not 0: whether the answer has this bit."""


class Field(NamedTuple):
    """A number that is read in a batch; `scope` is the link if there are several."""

    number: int
    scope: int = 0


class Fields(NamedTuple):
    """Fields that are added up."""

    fields: tuple[Field, ...]
    links: bool = False
    """Each one of each link."""
    times: int = 1
    wide: bool = False
    """Not shown if the driver counts in 32 bits, which are full within a second."""


class Gpm(NamedTuple):
    """A metric of GPM: it covers the time between two samples. Of a counter it is the rate."""

    number: int


Way = Call | Fields | Gpm


class Row(NamedTuple):
    """The series of one metric, by the value of its last attribute, with the ways to each."""

    metric: c.Metric
    every_s: float
    unit: Unit
    series: Mapping[str, tuple[Way, ...]]
    of_parts: bool = False
    """A MIG instance has it too. It shares all others with its board."""


class Series(NamedTuple):
    """One series of one board."""

    metric: c.Metric
    word: str
    unit: Unit
    pci: str
    start_ns: int

    def measurement(self, raw: float) -> Measurement:
        """In our unit; NaN beyond the bounds: the reader of all devices leaves that out."""
        per, most, least, whole = self.unit
        value = min(raw, whole) / per if least <= raw <= most else math.nan
        names = self.metric.attributes
        pci = [("pci", self.pci)] if "pci" in names else []
        word = [(names[-1], self.word)] if self.word else []
        return Measurement(self.metric, value, (*pci, *word), self.start_ns)


def _call(*function: Any, part: str | int | None = None, bit: int = 0) -> Call:
    return Call(function, part, bit)


def _sum(*numbers: int, links: bool = False) -> Fields:
    return Fields(tuple(Field(number) for number in numbers), links)


def _wide(number: int) -> Fields:
    return Fields((Field(number),), wide=True)


def _all_links(number: int) -> Fields:
    """In KiB, of all links together."""
    return Fields((Field(number, U32),), times=1024)


# Version 2 of the call does not count the driver's own memory as used.
_MEMORY, _OLD_MEMORY = ("nvmlDeviceGetMemoryInfo", 0x0200_0028), ("nvmlDeviceGetMemoryInfo",)
_REASONS = "nvmlDeviceGetCurrentClocksEventReasons"
# The call's name before driver 535.
_OLD_REASONS = "nvmlDeviceGetCurrentClocksThrottleReasons"
_BITS = {
    "application_clocks": 0x002,
    "sw_power": 0x004,
    "hw_slowdown": 0x008,
    "sync_boost": 0x010,
    "sw_thermal": 0x020,
    "hw_thermal": 0x040,
    "hw_power_brake": 0x080,
    "display_clock": 0x100,
}
# In nanoseconds: a field and, on older drivers, the policy of a call. From 251 on, field numbers
# differ between branches of the driver: so the finer reasons for heat cannot be asked for.
_THROTTLED = {
    "sw_power": (74, 0),
    "thermal": (75, 1),
    "sync_boost": (76, 2),
    "board_limit": (77, 3),
    "reliability": (79, 5),
}
_VIOLATION = "nvmlDeviceGetViolationStatus"
# Since the driver was loaded. With the errors of a board's whole life a run would start with those
# of years, and the board stores that count late and in part.
_ECC, _SINCE_LOADED = "nvmlDeviceGetTotalEccErrors", 0
_REMAPPED = "nvmlDeviceGetRemappedRows"
_MOST_FANS = 16
_ENGINES = {"sm": 2, "tensor": 5, "dram": 10, "fp64": 11, "fp32": 12, "fp16": 13}

ROWS = (
    Row(
        *(c.HW_GPU_UTILIZATION, MOVING_S, _PERCENT),
        {
            "general": (_call("nvmlDeviceGetUtilizationRates", part="gpu"),),
            "encoder": (_call("nvmlDeviceGetEncoderUtilization", part=0),),
            "decoder": (_call("nvmlDeviceGetDecoderUtilization", part=0),),
        },
    ),
    Row(
        *(c.OTEL_DDP_GPU_MEM_CONTROLLER_UTILIZATION, MOVING_S, _PERCENT),
        {"": (_call("nvmlDeviceGetUtilizationRates", part="memory"),)},
    ),
    Row(
        *(c.HW_GPU_MEMORY_USAGE, MOVING_S, Unit(most=2**50)),
        {"": (Call(_MEMORY, "used"), Call(_OLD_MEMORY, "used"))},
        of_parts=True,
    ),
    Row(
        *(c.HW_GPU_MEMORY_LIMIT, MOVING_S, Unit(most=2**50, least=1)),
        {"": (Call(_MEMORY, "total"), Call(_OLD_MEMORY, "total"))},
        of_parts=True,
    ),
    Row(
        *(c.HW_TEMPERATURE, MOVING_S, Unit(most=200, least=-60)),
        {
            # The second call is to replace the first one with CUDA 14.
            "core": (_call("nvmlDeviceGetTemperature", 0), _call("nvmlDeviceGetTemperatureV", 0)),
            "memory": (_sum(82),),
        },
    ),
    Row(
        *(c.HW_POWER, MOVING_S, _MILLIWATTS),
        {"": (_sum(186), _call("nvmlDeviceGetPowerUsage"))},
    ),
    Row(
        *(c.OTEL_DDP_GPU_CLOCK_FREQUENCY, MOVING_S, _MEGAHERTZ),
        {
            "sm": (_call("nvmlDeviceGetClockInfo", 1),),
            "memory": (_call("nvmlDeviceGetClockInfo", 2),),
        },
    ),
    Row(
        *(c.OTEL_DDP_GPU_THROTTLE_ACTIVE, MOVING_S, Unit(most=1)),
        {
            reason: (_call(_REASONS, bit=bit), _call(_OLD_REASONS, bit=bit))
            for reason, bit in _BITS.items()
        },
    ),
    Row(
        *(c.OTEL_DDP_GPU_ENGINE_ACTIVE, MOVING_S, _ROUNDED_PERCENT),
        {engine: (Gpm(number),) for engine, number in _ENGINES.items()},
        of_parts=True,
    ),
    Row(
        *(c.HW_GPU_IO, MOVING_S, _MIB_PER_S),
        {"transmit": (Gpm(20),), "receive": (Gpm(21),)},
    ),
    Row(
        *(c.HW_GPU_IO, COUNTING_S, Unit()),
        {"transmit": (_wide(197),), "receive": (_wide(198),)},
    ),
    Row(
        *(c.OTEL_DDP_GPU_NVLINK_IO, COUNTING_S, Unit()),
        {
            # The fifth generation of NVLink counts the bytes of each link instead.
            "transmit": (_all_links(138), _sum(202, links=True)),
            "receive": (_all_links(139), _sum(204, links=True)),
        },
    ),
    Row(
        *(c.OTEL_DDP_GPU_NVLINK_ERRORS, SETTLED_S, Unit()),
        {
            "": (
                # Checksum errors of control and of data, replays, recoveries.
                _sum(38, 45, 52, 59),
                # The same for each link.
                _sum(161, 162, 163, links=True),
                # The fifth generation: damaged packets, integrity failures, recoveries.
                _sum(208, 211, 215, links=True),
            )
        },
    ),
    Row(
        *(c.OTEL_DDP_GPU_THROTTLE_DURATION, COUNTING_S, Unit(1e9)),
        {
            reason: (_sum(field), _call(_VIOLATION, policy, part="violationTime"))
            for reason, (field, policy) in _THROTTLED.items()
        },
    ),
    Row(
        *(c.HW_ENERGY, COUNTING_S, Unit(1000)),
        {"": (_call("nvmlDeviceGetTotalEnergyConsumption"),)},
    ),
    Row(
        *(c.OTEL_DDP_GPU_POWER_LIMIT, SETTLED_S, _MILLIWATTS),
        {"": (_call("nvmlDeviceGetEnforcedPowerLimit"),)},
    ),
    Row(
        *(c.HW_FAN_SPEED_RATIO, SETTLED_S, _FAN_PERCENT),
        {str(fan): (_call("nvmlDeviceGetFanSpeed_v2", fan),) for fan in range(_MOST_FANS)},
    ),
    Row(
        *(c.HW_ERRORS, SETTLED_S, _EVENTS),
        {
            "corrected": (_call(_ECC, 0, _SINCE_LOADED),),
            "uncorrected": (_call(_ECC, 1, _SINCE_LOADED),),
        },
    ),
    Row(
        *(c.OTEL_DDP_GPU_REMAPPED_ROWS, SETTLED_S, _EVENTS),
        {"corrected": (_call(_REMAPPED, part=0),), "uncorrected": (_call(_REMAPPED, part=1),)},
    ),
    Row(
        *(c.OTEL_DDP_GPU_PCIE_REPLAYS, SETTLED_S, _EVENTS),
        {"": (_call("nvmlDeviceGetPcieReplayCounter"),)},
    ),
    Row(
        *(c.OTEL_DDP_GPU_PCIE_LINK_GENERATION, SETTLED_S, Unit(most=20, least=1)),
        {
            "current": (_call("nvmlDeviceGetCurrPcieLinkGeneration"),),
            "max": (_call("nvmlDeviceGetMaxPcieLinkGeneration"),),
        },
    ),
    Row(
        *(c.OTEL_DDP_GPU_PCIE_LINK_WIDTH, SETTLED_S, Unit(most=64, least=1)),
        {
            "current": (_call("nvmlDeviceGetCurrPcieLinkWidth"),),
            "max": (_call("nvmlDeviceGetMaxPcieLinkWidth"),),
        },
    ),
)
