"""Gathers what a report says of a run, as plain JSON. docs/report.md describes each key."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from otel_ddp.history.compare import side
from otel_ddp.history.compare.side import FORMAT, VERSION
from otel_ddp.history.page.values import thinned
from otel_ddp.history.postmortems import Postmortem
from otel_ddp.history.profiles import Profile
from otel_ddp.history.reader import Bucket
from otel_ddp.history.whole_run import Cell, StepBuckets, WholeRun, rank_cells
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import PHASES, UNUSUAL_PHASES

# Of a curve, and of the heatmap's columns and rows.
_MOST_POINTS, _MOST_COLUMNS, _MOST_ROWS = 1024, 120, 48
_MOST_FILES, _MOST_OPERATORS = 5, 20
# Verdicts that name a rank that others wait for.
LATE = ("straggler", "imbalance", "recurring")
_GPU = {
    catalog.HW_GPU_UTILIZATION.name: "busy_ratio",
    catalog.HW_GPU_MEMORY_USAGE.name: "used_bytes",
    catalog.HW_POWER.name: "power_w",
    catalog.HW_TEMPERATURE.name: "temperature_c",
}


def gather(
    run: WholeRun, postmortems: Sequence[Postmortem] = (), profiles: Sequence[Profile] = ()
) -> dict[str, Any]:
    """All of it; only the newest step of a run that goes on may be missing."""
    about, cells, verdicts = run.about, run.cells(), run.verdicts()
    return {
        "format": FORMAT,
        "version": VERSION,
        "otel_ddp": about.get("version") or "",
        "written_ns": time.time_ns(),
        "run": _run(run, cells),
        "texts": about.get("texts") or {},
        "environment": about.get("environment") or {},
        "config": about.get("config") or {},
        "ranks": [_rank(rank, each) for rank, each in run.ranks.items()],
        "values": list(_values(run)),
        "time": _time(cells),
        "late": [_late(each) for each in verdicts if each.get("kind") in LATE],
        "verdicts": verdicts,
        "gpus": list(_gpus(run)),
        "cost": _cost(run, cells),
        "gaps": about.get("gaps") or [],
        "postmortems": [each.described() for each in postmortems[:_MOST_FILES]],
        "profiles": [each.described(_MOST_OPERATORS) for each in profiles[:_MOST_FILES]],
        "curves": [_curve(*key, buckets) for key, buckets in run.values.items()],
        "work": _heatmap(run.step_buckets),
        "compared": side.to_json(side.of_run(run)),
    }


def _run(run: WholeRun, cells: Sequence[Cell]) -> dict[str, Any]:
    about = run.about
    began_ns, seen_ns = about.get("began_ns"), about.get("seen_ns")
    duration_s = None
    if isinstance(began_ns, int) and isinstance(seen_ns, int):
        duration_s = (seen_ns - began_ns) / 1e9
    return {
        "group": run.group,
        "run": run.name,
        "job_type": about.get("job_type") or "",
        "project": about.get("project") or "",
        "state": run.state,
        "reasons": sorted({str(e["reason"]) for e in run.ranks.values() if e.get("reason")}),
        "began_ns": began_ns,
        "seen_ns": seen_ns,
        "duration_s": duration_s,
        "nodes": run.nodes,
        "world_size": run.world_size,
        "steps": round(sum(each.steps for each in cells)),
        "last_step": max((each.get("step") or 0 for each in run.ranks.values()), default=None),
    }


def _rank(rank: str, about: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("node", "local_rank", "job_type", "state", "reason", "step", "pid", "started_ns")
    return {"rank": rank, **{key: about.get(key) for key in keys}}


def _values(run: WholeRun) -> Iterator[dict[str, Any]]:
    """The summary; of a name that has none, what the buckets say."""
    seen = {(row.get("name"), row.get("split")) for row in run.summary}
    for row in run.summary:
        direction = row.get("direction") or ""
        yield {**row, "direction": direction, "best": row.get(direction) if direction else None}
    for (name, split), buckets in run.values.items():
        finite = [each for each in buckets if each.finite]
        if (name, split) in seen or not finite:
            continue
        low = min(finite, key=lambda each: each.low or 0.0)
        high = max(finite, key=lambda each: each.high or 0.0)
        last = max(finite, key=lambda each: each.last_ns)
        yield {
            "name": name,
            "split": split,
            "direction": "",
            "best": None,
            "last": _point(last.last, last.until, last.last_ns),
            "min": _point(low.low, low.first, low.first_ns),
            "max": _point(high.high, high.first, high.first_ns),
        }


def _point(value: float | None, step: int, time_ns: int) -> dict[str, Any]:
    return {"value": value, "step": step, "time_ns": time_ns}


def _time(cells: Sequence[Cell]) -> dict[str, Any]:
    """Where the time of a rank went, on average over the ranks."""
    usual = [each for each in cells if each.usual]
    total_s = {word: sum(each.phases_s[word] * each.steps for each in cells) for word in PHASES}
    return {
        "step_s": median(each.took_s for each in usual) if usual else None,
        "steps_s": sum(each.took_s * each.steps for each in cells),
        "phases_s": {word: seconds for word, seconds in total_s.items() if seconds},
        "special": [word for word in UNUSUAL_PHASES if total_s[word]],
        "work_per_s": fmean(e.work / e.took_s for e in usual if e.took_s)
        if any(each.work and each.took_s for each in usual)
        else None,
    }


def _late(verdict: Mapping[str, Any]) -> dict[str, Any]:
    who, evidence = verdict.get("who") or {}, verdict.get("evidence") or {}
    keys = ("kind", "phase", "step", "since_step", "since_ns", "until_ns", "sentence")
    found = {"rank": who.get("rank"), "node": who.get("node"), "lost_s": evidence.get("lost_s")}
    return {**found, **{key: verdict.get(key) for key in keys}}


def _gpus(run: WholeRun) -> Iterator[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for history, series in run.series("node"):
        labels = dict(series.key.labels)
        device, key = labels.get("hw.id"), _GPU.get(series.key.name)
        # An encoder's work is not the device's.
        if device is None or key is None or labels.get("hw.gpu.task", "general") != "general":
            continue
        node = str(history.about.get("node") or "?")
        empty = {"node": node, "gpu": device, "model": "", "rank": ""}
        row = found.setdefault((node, device), empty)
        row["model"] = row["model"] or labels.get("hw.model", "")
        row["rank"] = row["rank"] or series.key.rank
        buckets = history.sums(series)
        highs = [each.high for each in buckets if each.high is not None]
        if highs and (count := sum(each.finite for each in buckets)):
            mean = sum(each.total for each in buckets) / count
            # A device has several sensors: the warmest counts.
            for name, number in ((f"{key}_mean", mean), (f"{key}_max", max(highs))):
                row[name] = max(number, row.get(name, number))
    yield from found.values()


def _cost(run: WholeRun, cells: Sequence[Cell]) -> dict[str, Any]:
    """Telemetry's own. The share is of the time that all ranks took for their steps."""
    steps_s = sum(each.took_s * each.steps for each in cells) * len(run.step_buckets)
    hook_s = run.cost.get("hook_s")
    share = None if hook_s is None or not steps_s else hook_s / steps_s
    return {**run.cost, "hook_share": share}


def _curve(name: str, split: str, buckets: Sequence[Bucket]) -> dict[str, Any]:
    """Points of a step, and the lowest, the mean and the highest value from there on."""
    finite = thinned([each for each in buckets if each.finite], _MOST_POINTS)
    return {
        "name": name,
        "split": split,
        "points": [[each.first, each.low, each.total / each.finite, each.high] for each in finite],
        "not_finite": sum(each.nonfinite for each in buckets),
    }


def _heatmap(ranks: StepBuckets) -> dict[str, Any]:
    """The work of each rank per step, by neighbouring steps; the ranks with most work, if many."""
    wide = max((width for _, width, _ in ranks.values()), default=1)
    last = max((each[-1].start for _, _, each in ranks.values() if each), default=0)
    wide *= -(-(last // wide + 1) // _MOST_COLUMNS)
    rows = {
        rank: {
            start: round(cell.took_s - cell.phases_s["comm_wait"], 7)
            for start, cell in rank_cells(buckets, wide).items()
        }
        for rank, (_, _, buckets) in ranks.items()
    }
    starts = sorted({start for row in rows.values() for start in row})
    shown = sorted(rows, key=lambda rank: -sum(rows[rank].values()))[:_MOST_ROWS]
    order = [rank for rank in rows if rank in shown]
    return {
        "ranks": order,
        "left_out": len(rows) - len(order),
        "first_steps": starts,
        "steps_each": wide,
        "work_s": [[rows[rank].get(start) for start in starts] for rank in order],
    }
