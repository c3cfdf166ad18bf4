"""The report of a run as plain JSON, and as a card. docs/json.md describes each key."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from otel_ddp import plain, shown
from otel_ddp.history import goodput
from otel_ddp.history.card import Card, CardValue
from otel_ddp.history.whole_run import Cell, WholeRun
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS, MEASURED_PHASES, is_taken_back

FORMAT, SCHEMA = "otel_ddp report", 8
_MOST_FILES = 5
_GPU = {
    catalog.HW_GPU_UTILIZATION.name: "busy_ratio",
    catalog.HW_GPU_MEMORY_USAGE.name: "used_bytes",
    catalog.HW_POWER.name: "power_w",
    catalog.HW_TEMPERATURE.name: "temperature_c",
}


def gather(run: WholeRun, postmortems: Sequence[Any] = ()) -> dict[str, Any]:
    """The report. *postmortems*: from `directory.postmortems`."""
    about, cells = run.about, run.cells()
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "otel_ddp": run.word("version"),
        "written_ns": time.time_ns(),
        "run": _run(run, cells),
        **{key: run.section(key) for key in ("texts", "environment", "config")},
        "ranks": [_rank(rank, each) for rank, each in run.ranks.items()],
        "values": [{**row, "best": row.get(str(row.get("direction")))} for row in run.summary],
        "time": _time(cells),
        "goodput": goodput.goodput_of(run),
        "verdicts": run.verdicts(),
        "gpus": list(_gpus(run)),
        "cost": run.cost,
        "gaps": about.get("gaps") or [],
        "postmortems": list(postmortems[:_MOST_FILES]),
    }


def _run(run: WholeRun, cells: Sequence[Cell]) -> dict[str, Any]:
    began_ns, seen_ns = run.began_ns, run.seen_ns
    return {
        **run.head(),
        "job_type": run.word("job_type"),
        "reasons": sorted({str(e["reason"]) for e in run.ranks.values() if e.get("reason")}),
        "began_ns": began_ns or None,
        "seen_ns": seen_ns or None,
        "duration_s": (seen_ns - began_ns) / 1e9 if began_ns and seen_ns else None,
        "look": run.look,
        "world_size": run.world_size,
        "steps": round(sum(each.steps for each in cells)),
        "last_step": run.step,
    }


def _rank(rank: str, about: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("node", "local_rank", "job_type", "state", "reason", "step", "pid", "started_ns")
    return {"rank": rank, **{key: about.get(key) for key in keys}}


def _time(cells: Sequence[Cell]) -> dict[str, Any]:
    """The time by phase, as a mean over the ranks."""
    usual = [each for each in cells if each.usual]
    total_s = {
        word: sum(each.phases_s[word] * each.steps for each in cells) for word in MEASURED_PHASES
    }
    usual_s = sum(each.took_s * each.steps for each in usual)
    work = sum(each.work * each.steps for each in usual)
    return {
        "step_s": median(each.took_s for each in usual) if usual else None,
        "steps_s": sum(each.took_s * each.steps for each in cells),
        "phases_s": {word: seconds for word, seconds in total_s.items() if seconds},
        "work_per_s": work / usual_s if work and usual_s else None,
    }


def _gpus(run: WholeRun) -> Iterator[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for history, series in run.series("node"):
        labels = dict(series.key.labels)
        device, key = labels.get("hw.id"), _GPU.get(series.key.name)
        # Leave out other metrics, and the utilization of the GPU's video encoders and decoders.
        if device is None or key is None or labels.get("hw.gpu.task", "general") != "general":
            continue
        node = labels.get("node", "?")
        empty = {"node": node, "gpu": device, "model": "", "rank": ""}
        row = found.setdefault((node, device), empty)
        row["model"] = row["model"] or labels.get("hw.model", "")
        row["rank"] = row["rank"] or series.key.rank
        buckets = history.sums(series)
        highs = [each.high for each in buckets if each.high is not None]
        if highs and (count := sum(each.finite for each in buckets)):
            mean = sum(each.total for each in buckets) / count
            # A GPU may have several series of one metric, such as temperatures: use the highest.
            for name, number in ((f"{key}_mean", mean), (f"{key}_max", max(highs))):
                row[name] = max(number, row.get(name, number))
    yield from found.values()


# -- as a card


def card_of(report: Mapping[str, Any], look: Sequence[str] = ()) -> Card:
    """The card of a report. A run prints such a card at its end, but with less data."""
    run, time = report["run"], report["time"]
    ranks, nodes = run["world_size"] or len(report["ranks"]), len(run["nodes"])
    return Card(
        title=f"run {run['group']}/{run['run']}" if run["group"] else f"run {run['run']}",
        state=run["state"],
        duration_s=run["duration_s"],
        reason="; ".join(run["reasons"][:2]),
        where=f"{ranks} rank{'s' * (ranks != 1)} on {nodes} node{'s' * (nodes != 1)}",
        steps=run["steps"],
        step_s=time["steps_s"] / run["steps"] if run["steps"] else None,
        phases_s=time["phases_s"],
        goodput=goodput.in_words(report["goodput"]) if report["goodput"] else "",
        values=[
            _card_value(each)
            for each in sorted(report["values"], key=lambda each: not each["best"])
        ],
        sentences=[
            str(each.get("sentence"))
            for each in report["verdicts"]
            if each.get("kind") not in HARMLESS_VERDICTS and not is_taken_back(each.get("evidence"))
        ],
        gpus=list(gpu_words(report["gpus"])),
        cost=cost_words(report["cost"]),
        look=[
            *filter(None, (*look, run["look"])),
            *(f"post-mortem {each['path']}" for each in report["postmortems"][:1]),
        ],
    )


def _card_value(row: Mapping[str, Any]) -> CardValue:
    last, best = plain.mapping(row["last"]), plain.mapping(row["best"])
    known = shown.logged(last), best.get("value"), best.get("step")
    return CardValue(str(row["name"]), str(row["split"] or ""), *known)


def gpu_words(gpus: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """One line on all GPUs."""
    if not gpus:
        return
    busy = [each["busy_ratio_mean"] for each in gpus if "busy_ratio_mean" in each]
    used = [each["used_bytes_max"] for each in gpus if "used_bytes_max" in each]
    hot = [each["temperature_c_max"] for each in gpus if "temperature_c_max" in each]
    models = sorted({str(each["model"]) for each in gpus if each["model"]})
    parts = [
        f"{len(gpus)} x {', '.join(models)}" if models else f"{len(gpus)}",
        f"busy {shown.share(fmean(busy))} (least {shown.share(min(busy))})" if busy else "",
        f"memory up to {shown.size(max(used))}" if used else "",
        f"up to {max(hot):.0f} °C" if hot else "",
    ]
    yield ", ".join(filter(None, parts))


def cost_words(cost: Mapping[str, Any]) -> str:
    """A clause on the cost of telemetry; empty if unknown."""
    if not cost["hook_s"]:
        return ""
    share = cost["hook_share"]
    of = "" if share is None else f" ({shown.share(share)} of the steps)"
    return f"hooks {shown.seconds(cost['hook_s'])} on all ranks{of}"
