"""Builds the documents that only programs ask for; docs/json.md describes each key."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from otel_ddp import plain
from otel_ddp.cli.options import find_places, history_directory
from otel_ddp.history.directory import NotFound
from otel_ddp.history.page import columns
from otel_ddp.history.page.exchange import Question
from otel_ddp.history.page.runs import Runs
from otel_ddp.history.whole_run import WholeRun
from otel_ddp.journal.survey import of_run, survey
from otel_ddp.vocabulary.words import ENDED_STATES

# Each rises with every change of the keys.
RUNS_SCHEMA = CURVES_SCHEMA = VERDICTS_SCHEMA = 1
_MOST_POINTS, _MOST_CURVES = 100, 20
_DIGITS = 6
_OF_RUN = ("group", "run", "job_type", "project", "name", "tags", "state", "silent")


# -- all runs


def runs() -> dict[str, Any]:
    """The runs whose histories are kept on this node, the newest first."""
    folder = history_directory()
    rows, faults = Runs(folder, ours=True).rows()
    return {
        "schema": RUNS_SCHEMA,
        "now_ns": time.time_ns(),
        "folder": str(folder),
        "runs": [_run(row) for row in rows],
        "faults": faults,
    }


def _run(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{key: row[key] for key in _OF_RUN},
        "began_ns": row["began_ns"],
        "ended_ns": row["seen_ns"] if row["state"] in ENDED_STATES else None,
        "seen_ns": row["seen_ns"],
        "nodes": row["nodes"],
        "world_size": row["world_size"],
        "step": row["step"],
        "values": [
            {
                "name": each.get("name"),
                "split": each.get("split") or "",
                "last": plain.mapping(each.get("last")).get("value"),
            }
            # Those that have a best one first.
            for each in sorted(row["summary"], key=lambda one: not one.get("direction"))
        ],
        "verdicts": row["verdicts"],
    }


# -- one run


def verdicts(run: WholeRun, directory: str) -> dict[str, Any]:
    """The verdicts on a run, the newest first. *directory*: as find_places takes it."""
    found = [*reversed(run.verdicts())]
    _, places, _ = find_places(directory)
    return {
        "schema": VERDICTS_SCHEMA,
        "now_ns": time.time_ns(),
        **_named(run),
        "open": [each for each in found if each.get("until_ns") is None],
        "past": [each for each in found if each.get("until_ns") is not None],
        "insufficient": [
            str(each.get("why"))
            for each in survey(places).insufficient
            if of_run(each) == (run.group, run.name)
        ],
        "look": run.look,
    }


def curves(
    run: WholeRun, names: Sequence[str], rank: str, first: int | None, until: int | None
) -> dict[str, Any]:
    """Logged values over steps, with few points. Raises NotFound for a name without values."""
    known = columns.names(run, "value")
    if missing := [each for each in names if each not in known]:
        has = ", ".join(known) or "none"
        raise NotFound(f"The run has logged no value {', '.join(missing)}. It has: {has}.")
    # Each further name has a series or more.
    names, unread = names[:_MOST_CURVES], len(names[_MOST_CURVES:])
    limits = {"first": first, "until": until}
    query = {
        "name": [*names],
        "rank": [rank],
        "columns": [str(_MOST_POINTS)],
        **{key: [str(step)] for key, step in limits.items() if step is not None},
    }
    found = columns.columns_of(run, Question("values", query), "value") if names else {}
    series = found.get("series", [])
    left_out = unread + found.get("left_out", 0) + max(len(series) - _MOST_CURVES, 0)
    return {
        "schema": CURVES_SCHEMA,
        **_named(run),
        "names": known,
        "curves": [_curve(each) for each in series[:_MOST_CURVES]],
        "left_out": {"curves": left_out} if left_out else {},
    }


def _curve(series: Mapping[str, Any]) -> dict[str, Any]:
    found = series["columns"]
    last = found["last"][-1] if found["last"] else None
    return {
        "name": series["name"],
        "split": series.get("split", ""),
        "rank": series["rank"],
        "node": series["node"],
        "values": sum(found["values"]),
        "not_finite": sum(found["not_finite"]),
        "min": _short(min(_known(found["low"]), default=None)),
        "max": _short(max(_known(found["high"]), default=None)),
        "last": _short(last),
        # Of neighbouring values: the last step, the mean, the lowest and the highest.
        "points": {
            "step": found["x"],
            **{key: [*map(_short, found[key])] for key in ("mean", "low", "high")},
        },
    }


def _known(found: Iterable[float | None]) -> list[float]:
    return [each for each in found if each is not None]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def _named(run: WholeRun) -> dict[str, Any]:
    return {"group": run.group, "run": run.name, "state": run.state}
