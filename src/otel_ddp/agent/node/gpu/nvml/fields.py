"""What is read of a board as fields of NVML, many of them in one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from otel_ddp import catalog
from otel_ddp.agent.node.gpu.driver import Absent
from otel_ddp.agent.node.gpu.nvml.calls import ALL_LINKS, U32, Calls, Field, FieldValue
from otel_ddp.agent.node.gpu.nvml.readings import Readings
from otel_ddp.agent.node.reading import Reading

POWER_NOW = Field(186)
_MEMORY_TEMPERATURE = Field(82)
# In nanoseconds. From 251 on the numbers of fields differ from one branch of the driver to the
# next, so that the finer reasons for heat cannot be asked for by number.
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
# The fifth generation counts the bytes of each link instead.
_NVLINK_BYTES = {202: "transmit", 204: "receive"}
# Checksums of control and of data, replays, recoveries; the same of each link; and what the fifth
# generation counts of each link: damaged packets, failures of integrity, recoveries.
_NVLINK_ERRORS = (38, 45, 52, 59)
_NVLINK_LINK_ERRORS = ((161, 162, 163), (208, 211, 215))

Ways = Mapping[Field, str]


class Fields:
    """Finds out at the start, in one call, which fields the board has."""

    def __init__(self, calls: Calls, readings: Readings, pci: str) -> None:
        self._calls = calls
        self._readings = readings
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

    def ask_moving(self) -> Iterable[Reading]:
        found = self._calls.fields(self.moving)
        if POWER_NOW in found:
            yield from self._readings.power(catalog.HW_POWER, found[POWER_NOW].value)
        if _MEMORY_TEMPERATURE in found:
            yield from self._readings.temperature("memory", found[_MEMORY_TEMPERATURE].value)

    def ask_throttled(self) -> Iterable[Reading]:
        for field, found in self._calls.fields(tuple(self.throttled)).items():
            yield from self._readings.throttled(self.throttled[field], found.value)

    def ask_pcie(self) -> Iterable[Reading]:
        for field, found in self._calls.fields(tuple(self.pcie)).items():
            way = self.pcie[field]
            if self._wraps(way, found):
                self._readings.remark(
                    "The driver counts bytes on PCIe in 32 bits, which are full within a second: "
                    "they are not shown."
                )
                raise Absent("32 bits")
            attributes = (("pci", self._pci), ("network.io.direction", way))
            yield from self._readings.counter(catalog.HW_GPU_IO, found.value, attributes)

    def _wraps(self, way: str, found: FieldValue) -> bool:
        """Whether this number has 32 bits, by its type or as it turns out.

        What may have been full several times between two readings cannot be put right: it would
        say of the busiest boards that they are idle.
        """
        before = self._pcie_before.get(way, 0.0)
        self._pcie_before[way] = found.value
        return found.narrow or found.value < before <= U32

    def ask_nvlink(self) -> Iterable[Reading]:
        found = self._calls.fields(tuple(self.nvlink))
        for way in dict.fromkeys(self.nvlink.values()):
            parts = [field for field in self.nvlink if self.nvlink[field] == way]
            # A sum that lacks a part would fall, and then seem to count anew.
            if all(part in found for part in parts):
                yield from self._readings.counter(
                    catalog.GPU_NVLINK_IO,
                    sum(found[part].value for part in parts),
                    (("network.io.direction", way),),
                    unit=self.nvlink_unit_bytes,
                )

    def ask_nvlink_errors(self) -> Iterable[Reading]:
        found = self._calls.fields(self.nvlink_errors)
        if len(found) < len(self.nvlink_errors):
            return ()
        errors = sum(each.value for each in found.values())
        return self._readings.counter(catalog.GPU_NVLINK_ERRORS, errors)


def _links(calls: Calls) -> int:
    try:
        found = calls.fields([_LINK_COUNT])
    except Absent:
        return 0
    count = found[_LINK_COUNT].value if _LINK_COUNT in found else 0
    return int(count) if count <= _MOST_LINKS else 0
