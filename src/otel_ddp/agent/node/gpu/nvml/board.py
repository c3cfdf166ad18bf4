"""The readings of one NVIDIA board: by which NVML call, how often, in which units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from otel_ddp import catalog
from otel_ddp.agent.node.gpu.driver import NotSupported, Question
from otel_ddp.agent.node.gpu.nvml.calls import U32, Calls
from otel_ddp.agent.node.gpu.nvml.fields import POWER_NOW, Fields
from otel_ddp.agent.node.gpu.nvml.measurements import Measurements
from otel_ddp.agent.node.measurement import Measurement
from otel_ddp.catalog import Metric

_MOVING_S = 1.0
_COUNTING_S = 5.0
_SETTLED_S = 10.0

_POLICIES = {0: "sw_power", 1: "thermal", 2: "sync_boost", 3: "board_limit", 5: "reliability"}

_THROTTLING = {
    0x002: "application_clocks",
    0x004: "sw_power",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal",
    0x040: "hw_thermal",
    0x080: "hw_power_brake",
    0x100: "display_clock",
}
_CLOCKS = {"sm": 1, "memory": 2}
_ECC = {"corrected": 0, "uncorrected": 1}
_SINCE_DRIVER_LOAD = 0  # the "volatile" count
_MOST_FANS = 16

_MOST_BYTES = 2.0**50
_FASTEST_HZ = 100e9

Ask = Callable[[], Iterable[Measurement]]


class Board:
    """A whole board; or, with `part`, a MIG instance, which shares everything but its memory."""

    def __init__(
        self, calls: Calls, measurements: Measurements, pci: str, *, part: bool = False
    ) -> None:
        self._calls = calls
        self._measurements = measurements
        self._pci = pci
        self._part = part
        self._memory_by: tuple[Any, ...] | None = None

    def questions(self, *, measures_pcie: bool) -> list[Question]:
        """*measures_pcie*: whether GPM already counts the bytes on PCIe."""
        asks: list[tuple[str, float, Ask]] = [("memory", _MOVING_S, self._memory)]
        if not self._part:
            asks += self._moving()
            asks += self._settled()
            asks += self._fields(measures_pcie)
        return [Question(name, every_s, _at_once(ask)) for name, every_s, ask in asks]

    def _moving(self) -> list[tuple[str, float, Ask]]:
        asks: list[tuple[str, float, Ask]] = [
            ("utilization", _MOVING_S, self._utilization),
            ("temperature", _MOVING_S, self._temperature),
            ("throttling", _MOVING_S, self._throttling),
        ]
        for task, function in _CODECS.items():
            asks.append((f"{task} utilization", _MOVING_S, self._codec(task, function)))
        for domain, clock in _CLOCKS.items():
            asks.append((f"{domain} clock", _MOVING_S, self._clock(domain, clock)))
        return asks

    def _settled(self) -> list[tuple[str, float, Ask]]:
        asks: list[tuple[str, float, Ask]] = [
            ("energy", _COUNTING_S, self._energy),
            ("power limit", _SETTLED_S, self._power_limit),
            ("PCIe replays", _SETTLED_S, self._pcie_replays),
            ("remapped rows", _SETTLED_S, self._remapped_rows),
            ("fans", _SETTLED_S, self._fans),
        ]
        for kind, number in _ECC.items():
            asks.append((f"{kind} memory errors", _SETTLED_S, self._ecc(kind, number)))
        for what, (metric, most, functions) in _LINK.items():
            for state, function in functions.items():
                ask = self._link(metric, most, state, function)
                asks.append((f"{state} PCIe {what}", _SETTLED_S, ask))
        return asks

    def _fields(self, measures_pcie: bool) -> list[tuple[str, float, Ask]]:
        fields = Fields(self._calls, self._measurements, self._pci)
        asks: list[tuple[str, float, Ask]] = []
        if fields.moving:
            asks.append(("power and memory temperature", _MOVING_S, fields.ask_moving))
        if POWER_NOW not in fields.moving:
            asks.append(("power", _MOVING_S, self._power))
        if fields.throttled:
            asks.append(("throttled time", _COUNTING_S, fields.ask_throttled))
        else:
            for policy, word in _POLICIES.items():
                ask = self._violation(policy, word)
                asks.append((f"throttled time: {word}", _COUNTING_S, ask))
        if fields.pcie and not measures_pcie:
            asks.append(("PCIe bytes", _COUNTING_S, fields.ask_pcie))
        if fields.nvlink:
            asks.append(("NVLink bytes", _COUNTING_S, fields.ask_nvlink))
        if fields.nvlink_errors:
            asks.append(("NVLink errors", _SETTLED_S, fields.ask_nvlink_errors))
        return asks

    def _utilization(self) -> Iterable[Measurement]:
        rates = self._calls.ask("nvmlDeviceGetUtilizationRates")
        task = (("hw.gpu.task", "general"),)
        yield from self._measurements.gauge(
            catalog.HW_GPU_UTILIZATION, rates.gpu / 100, task, at_most=1
        )
        yield from self._measurements.gauge(
            catalog.OTEL_DDP_GPU_MEM_CONTROLLER_UTILIZATION, rates.memory / 100, at_most=1
        )

    def _codec(self, task: str, function: str) -> Ask:
        def ask() -> Iterable[Measurement]:
            percent, _period_us = self._calls.ask(function)
            attributes = (("hw.gpu.task", task),)
            return self._measurements.gauge(
                catalog.HW_GPU_UTILIZATION, percent / 100, attributes, at_most=1
            )

        return ask

    def _memory(self) -> Iterable[Measurement]:
        memory = self._memory_info()
        yield from self._measurements.gauge(
            catalog.HW_GPU_MEMORY_USAGE, memory.used, at_most=_MOST_BYTES
        )
        yield from self._measurements.gauge(
            catalog.HW_GPU_MEMORY_LIMIT, memory.total, at_least=1, at_most=_MOST_BYTES
        )

    def _memory_info(self) -> Any:
        """Use version 2 of the call: it does not count the driver's own memory as used."""
        if self._memory_by is None:
            self._memory_by = (getattr(self._calls.lib, "nvmlMemory_v2", 0x0200_0028),)
            try:
                return self._calls.ask("nvmlDeviceGetMemoryInfo", *self._memory_by)
            except NotSupported:
                self._memory_by = ()
        return self._calls.ask("nvmlDeviceGetMemoryInfo", *self._memory_by)

    def _temperature(self) -> Iterable[Measurement]:
        try:
            celsius = self._calls.ask("nvmlDeviceGetTemperature", 0)
        except NotSupported:
            # The call that is to replace it with CUDA 14.
            celsius = self._calls.ask("nvmlDeviceGetTemperatureV", 0)
        return self._measurements.temperature("core", celsius)

    def _power(self) -> Iterable[Measurement]:
        return self._measurements.power(
            catalog.HW_POWER, self._calls.ask("nvmlDeviceGetPowerUsage")
        )

    def _power_limit(self) -> Iterable[Measurement]:
        limit = self._calls.ask("nvmlDeviceGetEnforcedPowerLimit")
        return self._measurements.power(catalog.OTEL_DDP_GPU_POWER_LIMIT, limit)

    def _energy(self) -> Iterable[Measurement]:
        millijoules = self._calls.ask("nvmlDeviceGetTotalEnergyConsumption")
        return self._measurements.counter(catalog.HW_ENERGY, millijoules, unit=1e-3)

    def _clock(self, domain: str, clock: int) -> Ask:
        def ask() -> Iterable[Measurement]:
            hertz = self._calls.ask("nvmlDeviceGetClockInfo", clock) * 1e6
            attributes = (("domain", domain),)
            return self._measurements.gauge(
                catalog.OTEL_DDP_GPU_CLOCK_FREQUENCY, hertz, attributes, at_most=_FASTEST_HZ
            )

        return ask

    def _throttling(self) -> Iterable[Measurement]:
        try:
            bits = self._calls.ask("nvmlDeviceGetCurrentClocksEventReasons")
        except NotSupported:
            # The call's name before driver 535.
            bits = self._calls.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        if bits > U32:
            self._measurements.gauge(catalog.OTEL_DDP_GPU_THROTTLE_ACTIVE, bits, at_most=U32)
            return
        for bit, reason in _THROTTLING.items():
            yield Measurement(
                catalog.OTEL_DDP_GPU_THROTTLE_ACTIVE, float(bool(bits & bit)), (("reason", reason),)
            )

    def _ecc(self, kind: str, number: int) -> Ask:
        """Memory errors since the driver was loaded.

        NVML also counts the errors of a board's whole life. A run would then start with the errors
        of years, and the board stores that count late and in part.
        """

        def ask() -> Iterable[Measurement]:
            errors = self._calls.ask("nvmlDeviceGetTotalEccErrors", number, _SINCE_DRIVER_LOAD)
            return self._measurements.events(catalog.HW_ERRORS, errors, (("error.type", kind),))

        return ask

    def _remapped_rows(self) -> Iterable[Measurement]:
        corrected, uncorrected, _pending, _failed = self._calls.ask("nvmlDeviceGetRemappedRows")
        for cause, rows in (("corrected", corrected), ("uncorrected", uncorrected)):
            yield from self._measurements.events(
                catalog.OTEL_DDP_GPU_REMAPPED_ROWS, rows, (("cause", cause),)
            )

    def _pcie_replays(self) -> Iterable[Measurement]:
        replays = self._calls.ask("nvmlDeviceGetPcieReplayCounter")
        return self._measurements.events(
            catalog.OTEL_DDP_GPU_PCIE_REPLAYS, replays, (("pci", self._pci),)
        )

    def _link(self, metric: Metric, most: int, link: str, function: str) -> Ask:
        def ask() -> Iterable[Measurement]:
            attributes = (("pci", self._pci), ("link", link))
            value = self._calls.ask(function)
            return self._measurements.gauge(metric, value, attributes, at_least=1, at_most=most)

        return ask

    def _fans(self) -> Iterable[Measurement]:
        count = min(self._calls.ask("nvmlDeviceGetNumFans"), _MOST_FANS)
        if not count:
            raise NotSupported("no fan")
        for fan in range(count):
            try:
                percent = self._calls.ask("nvmlDeviceGetFanSpeed_v2", fan)
            except NotSupported:
                continue
            # A fan may turn faster than its nominal maximum.
            share = min(percent / 100, 1.0) if percent <= 200 else percent
            yield from self._measurements.gauge(
                catalog.HW_FAN_SPEED_RATIO, share, (("fan", str(fan)),), at_most=1
            )

    def _violation(self, policy: int, word: str) -> Ask:
        def ask() -> Iterable[Measurement]:
            nanoseconds = self._calls.ask("nvmlDeviceGetViolationStatus", policy).violationTime
            return self._measurements.throttled(word, nanoseconds)

        return ask


_CODECS = {
    "encoder": "nvmlDeviceGetEncoderUtilization",
    "decoder": "nvmlDeviceGetDecoderUtilization",
}
_LINK: Mapping[str, tuple[Metric, int, Mapping[str, str]]] = {
    "generation": (
        catalog.OTEL_DDP_GPU_PCIE_LINK_GENERATION,
        20,
        {
            "current": "nvmlDeviceGetCurrPcieLinkGeneration",
            "max": "nvmlDeviceGetMaxPcieLinkGeneration",
        },
    ),
    "width": (
        catalog.OTEL_DDP_GPU_PCIE_LINK_WIDTH,
        64,
        {"current": "nvmlDeviceGetCurrPcieLinkWidth", "max": "nvmlDeviceGetMaxPcieLinkWidth"},
    ),
}


def _at_once(ask: Ask) -> Ask:
    """Read everything when the question is asked, not when the answer is used."""
    return lambda: tuple(ask())
