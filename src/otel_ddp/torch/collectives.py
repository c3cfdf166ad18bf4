"""Reads which collectives each process group has started and finished, from torch's own records.

All of it is private to torch and looked up by name: what a version lacks is left out.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from otel_ddp import containment
from otel_ddp.torch import process_group
from otel_ddp.torch.process_group import is_up

_MOST_GROUPS = 256
# For each process group: more than two ranks can differ by while one of them waits for the other.
_MOST_COLLECTIVES = 20
_LONGEST_TEXT = 300
# Arrivals at collectives are read only where that stops training for less than this share of the
# time: torch writes down the whole ring of its recorder, and holds the interpreter's lock. Before
# the first reading this much is expected for each entry, of as many as torch remembers.
_MOST_STOPPED = 0.001
_ENTRY_S = 30e-6
_RING = 2000
_RING_VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


def world() -> Any:
    """Torch's table of process groups; None where there is none."""
    if not is_up():
        return None
    return getattr(
        getattr(sys.modules["torch.distributed"], "distributed_c10d", None), "_world", None
    )


def started(group: Any) -> int | None:
    """How many collectives a process group has been given; None of a group without this process."""
    count = getattr(group, "_get_sequence_number_for_group", None)
    return None if count is None else containment.attempt(count, None)


def groups() -> list[dict[str, Any]]:
    """The process groups, by the names that they have on all ranks, and how far each has come.

    Each group itself counts what it was given, and has one name on all ranks. The flight recorder
    numbers groups differently on each rank, and not all backends have one.
    """
    found: list[dict[str, Any]] = []
    table = world()
    configs = getattr(table, "pg_backend_config", {})
    members = getattr(table, "pg_group_ranks", {})
    for group, name in list(getattr(table, "pg_names", {}).items())[:_MOST_GROUPS]:
        description = getattr(group, "group_desc", "")
        found.append(
            {
                "name": str(name),
                "description": "" if description == "undefined" else str(description),
                "backend": str(configs.get(group, "")),
                "size": len(members.get(group, ())),
                "enqueued": started(group),
                "started": None,
                "completed": None,
            }
        )
    for backend, dump in _flight_recorders(includeCollectives=False):
        statuses = dump.get("pg_status")
        if isinstance(statuses, dict):
            _add_statuses(backend, statuses, found)
    return found


def _add_statuses(backend: str, statuses: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """The recorder numbers the groups of a backend in the order in which they were made."""
    mine = [each for each in found if backend in each["backend"]]
    for number, status in statuses.items():
        if not number.isdigit() or int(number) >= len(mine) or not isinstance(status, dict):
            continue
        group = mine[int(number)]
        # After groups were destroyed that order no longer holds: then the counts differ.
        if _number(status.get("last_enqueued_collective")) == group["enqueued"]:
            group["started"] = _number(status.get("last_started_collective"))
            group["completed"] = _number(status.get("last_completed_collective"))


def latest() -> list[dict[str, Any]]:
    """The last collectives of each process group: on NCCL those under way, on gloo all. Slow."""
    found: dict[str, list[dict[str, Any]]] = {}
    for _, dump in _flight_recorders(includeCollectives=True, onlyActive=True):
        entries = dump.get("entries")
        for entry in entries if isinstance(entries, list) else ():
            name = entry.get("process_group")
            if entry.get("is_p2p") or not isinstance(name, list) or not name:
                continue
            mine = found.setdefault(str(name[0]), [])
            mine.append(
                {
                    "group": str(name[0]),
                    "number": entry.get("collective_seq_id"),
                    "op": str(entry.get("profiling_name"))[:_LONGEST_TEXT],
                    "sizes": str(entry.get("input_sizes"))[:_LONGEST_TEXT],
                    "state": str(entry.get("state"))[:_LONGEST_TEXT],
                }
            )
            del mine[:-_MOST_COLLECTIVES]
    return [each for mine in found.values() for each in mine]


class Arrivals:
    """When this rank arrived at its collectives, read as rarely as its cost demands."""

    def __init__(
        self,
        env: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """*work_clock*: of this thread's own work, which other threads do not prolong."""
        rings = [env[name] for name in _RING_VARIABLES if env.get(name, "").isdigit()]
        self._takes_s = (int(rings[0]) if rings else _RING) * _ENTRY_S
        self._clock, self._work_clock = clock, work_clock
        self._read_s = clock()

    def read(self) -> dict[str, Any]:
        """The content of torch's recorder, as torch packs it, or when it may be read."""
        now_s = self._clock()
        pause_s = self._takes_s / _MOST_STOPPED
        if (left_s := self._read_s + pause_s - now_s) > 0:
            return {"in_s": left_s}
        began_s = self._work_clock()
        # Under nccl that is its own one: the host goes on there, and the device waits.
        recorder = "nccl" if "nccl" in process_group.backend() else "gloo"
        name = "_dump_nccl_trace" if recorder == "nccl" else "_dump_fr_trace"
        dump = getattr(getattr(torch._C, "_distributed_c10d", None), name, None)
        content = b""
        if dump is not None and world() is not None:
            # Stacks would take seconds. As JSON, the same would take twice as long.
            wanted = {"includeCollectives": True, "includeStackTraces": False, "onlyActive": False}
            content = containment.attempt(lambda: dump(**wanted), None) or b""
        self._takes_s = self._work_clock() - began_s
        self._read_s = self._clock()
        packed = base64.b64encode(zlib.compress(content, 1)).decode()
        in_s = self._takes_s / _MOST_STOPPED
        return {"takes_s": self._takes_s, "in_s": in_s, "packed": packed, "recorder": recorder}


def _flight_recorders(**wanted: bool) -> list[tuple[str, dict[str, Any]]]:
    """The content of the flight recorders that this torch has, by their backends."""
    found = []
    c10d = getattr(torch._C, "_distributed_c10d", None)
    for backend, name in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
        dump = getattr(c10d, name, None)
        if dump is None or world() is None:
            continue
        text = containment.attempt(lambda read=dump: read(**wanted), None)  # type: ignore[misc]
        with contextlib.suppress(TypeError, ValueError):
            content = json.loads(text or "null")
            if isinstance(content, dict):
                found.append((backend, content))
    return found


def _number(text: Any) -> int | None:
    """A count of the recorder, in which -1 means unknown."""
    try:
        number = int(text)
    except (TypeError, ValueError):
        return None
    return None if number < 0 else number
