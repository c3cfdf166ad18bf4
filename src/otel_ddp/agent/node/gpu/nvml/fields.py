"""Reads NVML's fields of a board, many of them in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from otel_ddp import catalog
from otel_ddp.agent.node.gpu.driver import NotSupported
from otel_ddp.agent.node.gpu.nvml.calls import ALL_LINKS, U32, Calls, Field, FieldValue
from otel_ddp.agent.node.gpu.nvml.measurements import Measurements
from otel_ddp.agent.node.measurement import Measurement

POWER_NOW = Field(186)
_MEMORY_TEMPERATURE = Field(82)
# In nanoseconds. From 251 on, field numbers differ between branches of the driver: so the finer
# reasons for heat cannot be asked for by number.
_THROTTLED = {
    Field(74): "sw_power",
    Field(75): "thermal",
    Field(76): "sync_boost",
    Field(77): "board_limit",
    Field(79): "reliability",
}
_PCIE = {Field(197): "transmit", Field(198): "receive"}
_LINK_COUNT = Field(91)
_MOST_LINKS = 72
_NVLINK_KIB = {Field(138, ALL_LINKS): "transmit", Field(139, ALL_LINKS): "receive"}
# The fifth generation of NVLink counts the bytes of each link instead.
_NVLINK_BYTES = {202: "transmit", 204: "receive"}
# Checksum errors of control and of data, replays, recoveries; then the same for each link. The
# fifth generation counts, for each link: damaged packets, integrity failures, recoveries.
_NVLINK_ERRORS = (38, 45, 52, 59)
_NVLINK_LINK_ERRORS = ((161, 162, 163), (208, 211, 215))

Ways = Mapping[Field, str]


class Fields:
    """Asks once, at the start, which fields the board has."""

    def __init__(self, calls: Calls, measurements: Measurements, pci: str) -> None:
        self._calls = calls
        self._measurements = measurements
        self._pci = pci
        self._pcie_before: dict[str, float] = {}
        links = range(_links(calls))
        bytes_of_links = {Field(n, link): way for n, way in _NVLINK_BYTES.items() for link in links}
        errors = [
            [Field(number) for number in _NVLINK_ERRORS],
            *([Field(n, link) for n in ns for link in links] for ns in _NVLINK_LINK_ERRORS),
        ]
        moving = [POWER_NOW, _MEMORY_TEMPERATURE]
        wanted = [*moving, *_THROTTLED, *_PCIE, *_NVLINK_KIB, *bytes_of_links]
        has = calls.supported([*wanted, *(field for each in errors for field in each)])
        self.moving = [field for field in moving if field in has]
        self.throttled = {field: word for field, word in _THROTTLED.items() if field in has}
        self.pcie = {field: way for field, way in _PCIE.items() if field in has}
        self.nvlink_unit_bytes = 1024 if has & _NVLINK_KIB.keys() else 1
        ways = _NVLINK_KIB if self.nvlink_unit_bytes == 1024 else bytes_of_links
        self.nvlink = {field: way for field, way in ways.items() if field in has}
        known = ([field for field in each if field in has] for each in errors)
        self.nvlink_errors: Sequence[Field] = next(filter(None, known), [])

    def ask_moving(self) -> Iterable[Measurement]:
        found = self._calls.fields(self.moving)
        if POWER_NOW in found:
            yield from self._measurements.power(catalog.HW_POWER, found[POWER_NOW].value)
        if _MEMORY_TEMPERATURE in found:
            yield from self._measurements.temperature("memory", found[_MEMORY_TEMPERATURE].value)

    def ask_throttled(self) -> Iterable[Measurement]:
        for field, found in self._calls.fields(tuple(self.throttled)).items():
            yield from self._measurements.throttled(self.throttled[field], found.value)

    def ask_pcie(self) -> Iterable[Measurement]:
        for field, found in self._calls.fields(tuple(self.pcie)).items():
            way = self.pcie[field]
            if self._wraps(way, found):
                self._measurements.remark(
                    "The driver counts bytes on PCIe in 32 bits, which are full within a second: "
                    "they are not shown."
                )
                raise NotSupported("32 bits")
            attributes = (("pci", self._pci), ("network.io.direction", way))
            yield from self._measurements.counter(catalog.HW_GPU_IO, found.value, attributes)

    def _wraps(self, way: str, found: FieldValue) -> bool:
        """Whether this counter has only 32 bits, by its type or because it fell.

        It may wrap several times between two reads, which cannot be corrected: the busiest boards
        would look idle.
        """
        before = self._pcie_before.get(way, 0.0)
        self._pcie_before[way] = found.value
        return found.narrow or found.value < before <= U32

    def ask_nvlink(self) -> Iterable[Measurement]:
        found = self._calls.fields(tuple(self.nvlink))
        for way in dict.fromkeys(self.nvlink.values()):
            parts = [field for field in self.nvlink if self.nvlink[field] == way]
            # A sum without one link would fall, which looks like a reset of the counter.
            if all(part in found for part in parts):
                yield from self._measurements.counter(
                    catalog.OTEL_DDP_GPU_NVLINK_IO,
                    sum(found[part].value for part in parts),
                    (("network.io.direction", way),),
                    unit=self.nvlink_unit_bytes,
                )

    def ask_nvlink_errors(self) -> Iterable[Measurement]:
        found = self._calls.fields(self.nvlink_errors)
        if len(found) < len(self.nvlink_errors):
            return ()
        errors = sum(each.value for each in found.values())
        return self._measurements.counter(catalog.OTEL_DDP_GPU_NVLINK_ERRORS, errors)


def _links(calls: Calls) -> int:
    try:
        found = calls.fields([_LINK_COUNT])
    except NotSupported:
        return 0
    count = found[_LINK_COUNT].value if _LINK_COUNT in found else 0
    return int(count) if count <= _MOST_LINKS else 0
