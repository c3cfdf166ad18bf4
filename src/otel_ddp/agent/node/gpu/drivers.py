"""The drivers that the agent knows, and the choice of the one that this node has."""

from __future__ import annotations

from collections.abc import Sequence

from otel_ddp.agent.node.gpu.amd import Amd
from otel_ddp.agent.node.gpu.driver import Driver, DriverMissing, NothingHere
from otel_ddp.agent.node.gpu.nvml import Nvml


def known() -> list[Driver]:
    """One for each vendor. None of them is opened, and none imports its library before that."""
    return [Nvml(), Amd()]


def opened(drivers: Sequence[Driver]) -> Driver:
    """The first one that has devices here; raises DriverMissing with the reasons.

    A vendor of which the machine has nothing counts only where it has nothing of any.
    """
    reasons: list[DriverMissing] = []
    for driver in drivers:
        try:
            driver.open()
        except DriverMissing as why:  # noqa: PERF203
            reasons.append(why)
        else:
            return driver
    if wrong := [str(each) for each in reasons if not isinstance(each, NothingHere)]:
        raise DriverMissing(" ".join(wrong))
    raise NothingHere(" ".join(map(str, reasons)))
