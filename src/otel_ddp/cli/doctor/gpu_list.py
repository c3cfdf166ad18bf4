"""Prints which GPUs there are; the doctor runs it in a process of its own."""

from __future__ import annotations

import json
import os

from otel_ddp.agent.node.gpu import drivers
from otel_ddp.agent.node.gpu.driver import DriverMissing


def print_gpus() -> None:
    """Print what the driver reports as JSON; a call of it may never return."""
    try:
        driver = drivers.opened(drivers.known())
    except DriverMissing as why:
        print(json.dumps({"missing": str(why)}))
        return
    devices = driver.devices()
    visible = driver.visible(os.environ)
    chosen = [each for uuid in visible or () for each in devices if each.uuid == uuid]
    answer = {
        "version": driver.version(),
        "devices": [(each.index, each.name) for each in devices],
        "visible": None if visible is None else [each.index for each in chosen],
        "remarks": list(driver.silent),
    }
    driver.close()
    print(json.dumps(answer))
