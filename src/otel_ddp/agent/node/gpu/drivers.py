"""The drivers that the agent knows, and the choice of the one that this node has."""

from __future__ import annotations

from collections.abc import Sequence

from otel_ddp.agent.node.gpu.driver import Driver, DriverMissing
from otel_ddp.agent.node.gpu.nvml import Nvml


def known() -> list[Driver]:
    """One for each vendor. None of them is opened, and none imports its library before that."""
    return [Nvml()]


def opened(drivers: Sequence[Driver]) -> Driver:
    """The first one that has devices here; raises DriverMissing with the reasons of all."""
    reasons = []
    for driver in drivers:
        try:
            driver.open()
        except DriverMissing as why:  # noqa: PERF203
            reasons.append(str(why))
        else:
            return driver
    raise DriverMissing(" ".join(reasons))
