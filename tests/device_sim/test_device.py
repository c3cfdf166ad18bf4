"""What our own device counts: that the host waits for it, and why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node import Node, finished

pytestmark = [pytest.mark.timed, pytest.mark.usefixtures("device_sim")]

TRIES = """
import json, sys
sys.path.insert(0, sys.argv[1])
import sim
import torch

def waits(act):
    before = torch.sim.counts()
    act()
    return sim.waits_since(before)

sim.install()
pinned = torch.ones(4, pin_memory=True)
on_device = pinned.to(sim.NAME)
found = {
    "launch": waits(lambda: (on_device * 2).sum()),
    "item": waits(lambda: on_device.sum().item()),
    "to the device": waits(lambda: pinned.to(sim.NAME, non_blocking=True)),
    "page-locked": waits(lambda: pinned.copy_(on_device, non_blocking=True)),
    "pageable": waits(lambda: torch.ones(4).copy_(on_device, non_blocking=True)),
    "sizes by data": waits(on_device.nonzero),
    "stream": waits(torch.sim.current_stream().synchronize),
}
print(json.dumps(found), flush=True)
# It ends although a kernel never does.
torch.sim.busy(float("inf"))
"""


def test_what_the_host_waits_for_is_counted_by_its_reason() -> None:
    with Node() as node:
        said = finished(node.warm("-c", TRIES, str(Path(__file__).parent)))

    assert json.loads(said.splitlines()[-1]) == {
        "launch": {},
        "item": {"item": 1},
        "to the device": {},
        "page-locked": {},
        "pageable": {"copy": 1},
        "sizes by data": {"fallback": 1, "aten::nonzero": 1},
        "stream": {"stream": 1},
    }
