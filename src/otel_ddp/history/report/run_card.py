"""The card of a run, from its report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from otel_ddp.history.card import Card, CardValue
from otel_ddp.history.quantities import shown_bytes, shown_s
from otel_ddp.words import HARMLESS_VERDICTS


def of_report(report: Mapping[str, Any], look: Sequence[str] = ()) -> Card:
    """The same lines that a run shows at its end, with what only a history knows."""
    run, time = report["run"], report["time"]
    ranks, nodes = run["world_size"] or len(report["ranks"]), len(run["nodes"])
    return Card(
        title=f"run {run['group']}/{run['run']}" if run["group"] else f"run {run['run']}",
        state=run["state"],
        duration_s=run["duration_s"],
        reason="; ".join(run["reasons"][:2]),
        where=f"{ranks} rank{'s' * (ranks != 1)} on {nodes} node{'s' * (nodes != 1)}",
        steps=run["steps"],
        step_s=time["step_s"],
        phases_s=time["phases_s"],
        values=[
            CardValue(
                str(each["name"]),
                str(each["split"] or ""),
                *(
                    _of(each["last"], "value"),
                    _of(each["best"], "value"),
                    _of(each["best"], "step"),
                ),
            )
            for each in sorted(report["values"], key=lambda each: not each["best"])
        ],
        sentences=[
            str(each.get("sentence"))
            for each in report["verdicts"]
            if each.get("kind") not in HARMLESS_VERDICTS
        ],
        gpus=list(gpu_words(report["gpus"])),
        cost=cost_words(report["cost"]),
        look=[*look, *(f"post-mortem {each['path']}" for each in report["postmortems"][:1])],
    )


def gpu_words(gpus: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """All GPUs in one line."""
    if not gpus:
        return
    busy = [each["busy_ratio_mean"] for each in gpus if "busy_ratio_mean" in each]
    used = [each["used_bytes_max"] for each in gpus if "used_bytes_max" in each]
    hot = [each["temperature_c_max"] for each in gpus if "temperature_c_max" in each]
    models = sorted({str(each["model"]) for each in gpus if each["model"]})
    parts = [
        f"{len(gpus)} x {', '.join(models)}" if models else f"{len(gpus)}",
        f"busy {sum(busy) / len(busy) * 100:.0f} % (least {min(busy) * 100:.0f} %)" if busy else "",
        f"memory up to {shown_bytes(max(used))}" if used else "",
        f"up to {max(hot):.0f} °C" if hot else "",
    ]
    yield ", ".join(filter(None, parts))


def cost_words(cost: Mapping[str, Any]) -> str:
    """Telemetry's own."""
    parts = []
    if isinstance(cost.get("hook_s"), (int, float)):
        share = cost.get("hook_share")
        of = "" if share is None else f" ({share * 100:.2g} % of the steps)"
        parts.append(f"hooks {shown_s(cost['hook_s'])} on all ranks{of}")
    if isinstance(cost.get("agent_cpu_s"), (int, float)):
        parts.append(f"agents {shown_s(cost['agent_cpu_s'])} of a core")
    return ", ".join(parts)


def _of(point: Any, key: str) -> Any:
    return point.get(key) if isinstance(point, dict) else None
