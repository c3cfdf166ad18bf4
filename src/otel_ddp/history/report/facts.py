"""Gathers what a report says of a run, as plain JSON. docs/report.md describes each key."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any

from otel_ddp import catalog
from otel_ddp.history.compare import side
from otel_ddp.history.group_steps import Cell, group_cells, one_cell, rank_cells
from otel_ddp.history.postmortems import Postmortem
from otel_ddp.history.profiles import Profile
from otel_ddp.history.reader import Bucket, Series
from otel_ddp.history.report_file import FORMAT, VERSION
from otel_ddp.history.whole_run import WholeRun
from otel_ddp.words import PHASES, UNUSUAL_PHASES

# Of a curve, and of the heatmap's columns and rows.
_MOST_POINTS, _MOST_COLUMNS, _MOST_ROWS = 1024, 120, 48
_MOST_FILES, _MOST_OPERATORS = 5, 20
# Verdicts that name a rank that others wait for.
LATE = ("straggler", "imbalance", "recurring")
_GPU = {
    "busy_ratio": catalog.HW_GPU_UTILIZATION,
    "used_bytes": catalog.HW_GPU_MEMORY_USAGE,
    "power_w": catalog.HW_POWER,
    "temperature_c": catalog.HW_TEMPERATURE,
}


def gather(
    run: WholeRun, postmortems: Sequence[Postmortem] = (), profiles: Sequence[Profile] = ()
) -> dict[str, Any]:
    """All of it; only the newest step of a run that goes on may be missing."""
    about, ranks = run.about, run.step_buckets()
    cells = group_cells(ranks)
    verdicts = run.verdicts()
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
        "cost": _cost(about.get("cost") or {}, cells, len(ranks)),
        "gaps": about.get("gaps") or [],
        "postmortems": [each.described() for each in postmortems[:_MOST_FILES]],
        "profiles": [each.described(_MOST_OPERATORS) for each in profiles[:_MOST_FILES]],
        "curves": [_curve(*key, buckets) for key, buckets in run.values().items()],
        "work": _heatmap(ranks),
        "compared": side.to_json(side.of_run(run)),
    }


def _run(run: WholeRun, cells: Sequence[Cell]) -> dict[str, Any]:
    about, environment = run.about, run.about.get("environment") or {}
    began_ns, seen_ns = about.get("began_ns"), about.get("seen_ns")
    duration_s = None
    if isinstance(began_ns, int) and isinstance(seen_ns, int):
        duration_s = (seen_ns - began_ns) / 1e9
    sizes = [
        environment.get("world_size"),
        *(each.get("world_size") for each in run.ranks.values()),
    ]
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
        "world_size": next((size for size in sizes if size), None),
        "steps": round(sum(each.steps for each in cells)),
        "last_step": max((each.get("step") or 0 for each in run.ranks.values()), default=None),
    }


def _rank(rank: str, about: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("node", "local_rank", "job_type", "state", "reason", "step", "pid", "started_ns")
    return {"rank": rank, **{key: about.get(key) for key in keys}}


def _values(run: WholeRun) -> Iterator[dict[str, Any]]:
    """The summary; of a name that has none, what the buckets say."""
    rows = [row for row in run.about.get("summary") or () if isinstance(row, dict)]
    seen = {(row.get("name"), row.get("split")) for row in rows}
    for row in rows:
        direction = row.get("direction") or ""
        yield {**row, "direction": direction, "best": row.get(direction) if direction else None}
    for (name, split), buckets in run.values().items():
        finite = [each for each in buckets if each.finite]
        if (name, split) in seen or not finite:
            continue
        low = min(finite, key=lambda each: each.low if each.low is not None else 0.0)
        high = max(finite, key=lambda each: each.high if each.high is not None else 0.0)
        last = max(finite, key=lambda each: each.last_ns)
        yield {
            "name": name,
            "split": split,
            "direction": "",
            "last": {"value": last.last, "step": last.until, "time_ns": last.last_ns},
            "min": {"value": low.low, "step": low.first, "time_ns": low.first_ns},
            "max": {"value": high.high, "step": high.first, "time_ns": high.first_ns},
            "best": None,
        }


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
    return {
        "kind": verdict.get("kind"),
        "rank": who.get("rank"),
        "node": who.get("node"),
        "phase": verdict.get("phase"),
        "step": verdict.get("step"),
        "since_step": verdict.get("since_step"),
        "since_ns": verdict.get("since_ns"),
        "until_ns": verdict.get("until_ns"),
        "lost_s": evidence.get("lost_s"),
        "sentence": verdict.get("sentence"),
    }


def _gpus(run: WholeRun) -> Iterator[dict[str, Any]]:
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for history, series in run.series("node"):
        labels = dict(series.key.labels)
        device = labels.get("hw.id")
        # An encoder's work is not the device's.
        is_part = labels.get("hw.gpu.task", "general") != "general"
        known = series.key.name in {each.name for each in _GPU.values()}
        if device is None or is_part or not known:
            continue
        node = str(history.about.get("node") or "?")
        row = found.setdefault(
            (node, device),
            {"node": node, "gpu": device, "model": "", "rank": ""},
        )
        row["model"] = row["model"] or labels.get("hw.model", "")
        row["rank"] = row["rank"] or series.key.rank
        _add_gpu(row, series, history.sums(series))
    yield from found.values()


def _add_gpu(row: dict[str, Any], series: Series, buckets: Sequence[Bucket]) -> None:
    key = next(key for key, metric in _GPU.items() if metric.name == series.key.name)
    count = sum(each.finite for each in buckets)
    highs = [each.high for each in buckets if each.high is not None]
    if count and highs:
        # A device has several sensors: the warmest counts.
        mean = sum(each.total for each in buckets) / count
        row[f"{key}_mean"] = max(mean, row.get(f"{key}_mean", mean))
        row[f"{key}_max"] = max(*highs, row.get(f"{key}_max", highs[0]))


def _cost(cost: Mapping[str, Any], cells: Sequence[Cell], ranks: int) -> dict[str, Any]:
    """Telemetry's own. The share is of the time that all ranks took for their steps."""
    steps_s = sum(each.took_s * each.steps for each in cells) * ranks
    hook_s = cost.get("hook_s")
    share = hook_s / steps_s if isinstance(hook_s, (int, float)) and steps_s else None
    return {**cost, "hook_share": share}


def _curve(name: str, split: str, buckets: Sequence[Bucket]) -> dict[str, Any]:
    """Points of a step, and the lowest, the mean and the highest value from there on."""
    finite = [each for each in buckets if each.finite]
    by = -(-len(finite) // _MOST_POINTS) or 1
    points = []
    for at in range(0, len(finite), by):
        group = finite[at : at + by]
        count = sum(each.finite for each in group)
        lows = [each.low for each in group if each.low is not None]
        highs = [each.high for each in group if each.high is not None]
        points.append([group[0].first, min(lows), sum(e.total for e in group) / count, max(highs)])
    return {
        "name": name,
        "split": split,
        "points": points,
        "not_finite": sum(each.nonfinite for each in buckets),
    }


def _heatmap(ranks: Mapping[str, tuple[str, int, Any]]) -> dict[str, Any]:
    """The work of each rank per step, by neighbouring steps; the ranks with most work, if many."""
    wide = max((width for _, width, _ in ranks.values()), default=1)
    last = max((each[-1].start for _, _, each in ranks.values() if each), default=0)
    wide *= -(-(last // wide + 1) // _MOST_COLUMNS)
    rows: dict[str, dict[int, float]] = {}
    for rank, (_, width, buckets) in ranks.items():
        grouped = rank_cells(buckets, width, wide)
        cells = {start: one_cell(group) for start, group in grouped.items()}
        rows[rank] = {start: _work_s(cell) for start, cell in cells.items()}
    starts = sorted({start for row in rows.values() for start in row})
    shown = sorted(rows, key=lambda rank: -sum(rows[rank].values()))[:_MOST_ROWS]
    order = [rank for rank in rows if rank in shown]
    return {
        "ranks": order,
        "left_out": len(rows) - len(order),
        "first_steps": starts,
        "steps_each": wide,
        "work_s": [[_rounded(rows[rank].get(start)) for start in starts] for rank in order],
    }


def _work_s(cell: Cell) -> float:
    return cell.took_s - cell.phases_s["comm_wait"]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 7)
