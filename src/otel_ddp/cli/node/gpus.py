"""Shows the GPUs of a node, as its agent describes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from otel_ddp.cli.text import cell, integer, mappings, number, padded

# A driver keeps a part of each board's memory for itself.
_IDLE_SHARE = 0.05
_WIDEST_CELL = 60
_HEADS = ("gpu", "name", "rank", "busy", "memory", "power", "temp", "throttled by")
# Remarks that tell only of a missing driver, as on any node without GPUs: the doctor shows them.
NO_DRIVER_REMARKS = ("There is no NVIDIA driver", "The NVIDIA kernel driver is not loaded")


def gpu_lines(agent: Mapping[str, Any]) -> Iterable[str]:
    """A table of the GPUs of one agent's node, and the agent's remarks on them."""
    gpus = mappings(agent.get("gpus"))
    remarks = gpu_remarks(agent)
    if not gpus:
        remarks = [each for each in remarks if not each.startswith(NO_DRIVER_REMARKS)]
    if not gpus and not remarks:
        return
    yield ""
    driver = cell(agent.get("gpu_driver"))
    yield ", ".join(filter(None, (f"GPUs of {cell(agent.get('node'), '?')}", driver)))
    if gpus:
        runs = {cell(gpu_labels(each).get("run")) for each in gpus} - {""}
        rows = [_HEADS, *(gpu_row(each, len(runs) > 1) for each in gpus)]
        yield from (f"  {line}" for line in padded(rows))
    yield from (f"  ! {each}" for each in remarks)


def gpu_remarks(agent: Mapping[str, Any]) -> list[str]:
    """What the agent remarks on its GPUs."""
    remarks = agent.get("gpu_remarks")
    return [cell(each, "?") for each in remarks] if isinstance(remarks, list) else []


def gpu_row(each: Mapping[str, Any], several_runs: bool) -> tuple[str, ...]:
    """Its index, name, rank, busy share, memory, power, temperature, and why it is throttled."""
    busy, celsius = number(each.get("busy_ratio")), number(each.get("temperature_c"))
    throttled = each.get("throttled")
    reasons = throttled if isinstance(throttled, list) else ()
    row = (
        cell(each.get("index"), "?"),
        cell(each.get("name"), "?"),
        gpu_user(each, several_runs),
        "-" if busy is None else f"{busy:.0%}",
        _share(each.get("used_bytes"), each.get("limit_bytes"), 1 << 30, "GiB", 1),
        _share(each.get("power_w"), each.get("power_limit_w"), 1, "W", 0),
        "-" if celsius is None else f"{celsius:.0f} °C",
        ", ".join(cell(reason, "?") for reason in reasons) or "-",
    )
    return tuple(text[:_WIDEST_CELL] for text in row)


def gpu_user(gpu: Mapping[str, Any], several_runs: bool) -> str:
    """The rank that uses a GPU: `3`, `3 of run x` if there are several runs, `free` and so on."""
    labels = gpu_labels(gpu)
    run = cell(labels.get("run"), "?")
    if rank := cell(labels.get("rank")):
        return f"{rank} of run {run}" if several_runs else rank
    if "run" in labels:
        return f"shared by run {run}"
    # Other processes, or several runs at once. In a container the driver may tell of no process,
    # but of the memory that they hold.
    used, limit = number(gpu.get("used_bytes")), number(gpu.get("limit_bytes"))
    held = used is not None and limit is not None and used > _IDLE_SHARE * limit
    return "others" if held or integer(gpu.get("processes")) else "free"


def gpu_labels(gpu: Mapping[str, Any]) -> Mapping[str, Any]:
    """Whose GPU it is, as the labels of its series."""
    found = gpu.get("labels")
    return found if isinstance(found, Mapping) else {}


def _share(part: Any, total: Any, unit: int, name: str, digits: int) -> str:
    """`60.0/80.0 GiB`, or as much of it as is known."""
    used, most = (
        "-" if value is None else f"{value / unit:.{digits}f}"
        for value in (number(part), number(total))
    )
    if used == most == "-":
        return "-"
    return f"{used} {name}" if most == "-" else f"{used}/{most} {name}"
