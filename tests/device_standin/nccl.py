"""Stands in for NCCL: a process group, and what torch's flight recorder would tell of it.

The recorder tells when the devices came to their collectives and were done with them: the same
names, numbers, states and durations as torch's own, from the same moments.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from device import NAME as DEVICE
from device import Collective, Device

NAME = "nccl_standin"


class Group(dist.ProcessGroup):
    """Counts the collectives that are queued on the device.

    What DDP asks for when it is built, shapes and parameters, the hosts do among themselves.
    """

    def __init__(self, device: Device, hosts: dist.ProcessGroupGloo, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._device = device
        self._register_backend(torch.device("cpu"), self.BackendType.GLOO, hosts)
        self._set_default_backend(self.BackendType.GLOO)

    def _get_sequence_number_for_group(self) -> int:
        launched = self._device.collectives
        return launched[-1].number if launched else 0


class Recorder:
    """What torch's recorder for NCCL would say of the collectives of one device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Without it there is no event at the beginning of a collective, only one at its end.
        self._timed = os.environ.get("TORCH_NCCL_ENABLE_TIMING") == "1"

    def as_json(self, includeCollectives: bool = True, onlyActive: bool = False) -> bytes:
        """See `torch._C._distributed_c10d._dump_nccl_trace_json`."""
        return json.dumps(self._content(includeCollectives, onlyActive)).encode()

    def as_pickle(
        self,
        includeCollectives: bool = True,
        includeStackTraces: bool = True,
        onlyActive: bool = False,
    ) -> bytes:
        """See `torch._C._distributed_c10d._dump_nccl_trace`."""
        return pickle.dumps(self._content(includeCollectives, onlyActive))

    def _content(self, collectives: bool, only_active: bool) -> dict[str, Any]:
        now_s = time.monotonic()
        entries = [self._entry(each, now_s) for each in self._device.collectives.copy()]
        started = ("started", "completed") if self._timed else ()
        status = {
            "last_enqueued_collective": _last(entries, ("scheduled", "started", "completed")),
            "last_started_collective": _last(entries, started),
            "last_completed_collective": _last(entries, ("completed",)),
        }
        content: dict[str, Any] = {"version": "2.10", "pg_status": {"0": status} if entries else {}}
        if collectives:
            content["entries"] = [
                each for each in entries if not (only_active and each["state"] == "completed")
            ]
        return content

    def _entry(self, each: Collective, now_s: float) -> dict[str, Any]:
        entry = {
            "process_group": ["0", "default_pg"],
            "collective_seq_id": each.number,
            "is_p2p": False,
            "profiling_name": f"nccl:{each.op}",
            "time_created_ns": each.launched_ns,
            "input_sizes": each.sizes,
            "state": "scheduled",
        }
        # Done is set last: both are known then.
        done_s, came_s = each.done_s, each.came_s
        if came_s is None or came_s > now_s:
            return entry
        if done_s is not None and done_s <= now_s:
            took = {"duration_ms": (done_s - came_s) * 1000} if self._timed else {}
            return {**entry, "state": "completed", **took}
        return {**entry, "state": "started"} if self._timed else entry


def _last(entries: list[dict[str, Any]], states: tuple[str, ...]) -> str:
    """The number of the last one in these states, as torch has it: -1 where there is none."""
    numbers = (each["collective_seq_id"] for each in entries if each["state"] in states)
    return str(max(numbers, default=-1))


def init_process_group(device: Device) -> None:
    """Make it the default group of torch, whose recorder tells of it from now on."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Group:
        device.join(dist.ProcessGroupGloo(dist.PrefixStore("devices", store), rank, size))
        hosts = dist.ProcessGroupGloo(dist.PrefixStore("hosts", store), rank, size)
        return Group(device, hosts, rank, size)

    recorder, c10d = Recorder(device), torch._C._distributed_c10d
    if "nccl" in NAME:
        c10d._dump_nccl_trace_json = recorder.as_json  # type: ignore[attr-defined]
        c10d._dump_nccl_trace = recorder.as_pickle
    # What goes over gloo here, no program of a user would see.
    c10d._dump_fr_trace_json = lambda **_: b"{}"  # type: ignore[attr-defined]
    dist.Backend.register_backend(NAME, create, devices=[DEVICE])
    dist.init_process_group(NAME)
