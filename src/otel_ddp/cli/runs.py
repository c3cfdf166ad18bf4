"""otel-ddp runs: lists the runs with histories on this node, newest first."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from typing import Any

from otel_ddp import plain, shown
from otel_ddp.cli.command import cell, history_directory, show
from otel_ddp.history.page.runs import Runs
from otel_ddp.history.terminal import aligned, shown_time
from otel_ddp.vocabulary.words import ENDED_STATES

SCHEMA = 2
_OF_RUN = ("group", "run", "job_type", "project", "name", "tags", "state", "silent")
_HEADS = ("run", "state", "began", "ended", "nodes", "world", "step", "last values")
_MOST_VALUES = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same as JSON, for programs")


def run(options: argparse.Namespace) -> int:
    found = document()
    return show(found, lines(found), as_json=options.json)


def document() -> dict[str, Any]:
    """The runs with histories on this node, newest first."""
    folder = history_directory()
    rows, faults = Runs(folder, ours=True).rows()
    return {
        "schema": SCHEMA,
        "now_ns": time.time_ns(),
        "folder": str(folder),
        "runs": [_described(row) for row in rows],
        "faults": faults,
    }


def _described(row: Mapping[str, Any]) -> dict[str, Any]:
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
            # Values that have a best value come first.
            for each in sorted(row["summary"], key=lambda one: not one.get("direction"))
            # Skip a value without `last`: only its best value, from an earlier attempt, is known.
            if each.get("last") is not None
        ],
        "verdicts": row["verdicts"],
    }


def lines(found: Mapping[str, Any]) -> Iterator[str]:
    """The document as lines for a terminal."""
    if found["runs"]:
        rows = [_HEADS, *(_row(each, found["now_ns"]) for each in found["runs"])]
        yield from aligned(rows, ("nodes", "world", "step"))
    else:
        yield f"no run is kept in {cell(found['folder'])}"
    yield from (f"! {cell(why)}" for why in found["faults"])


def _row(run: Mapping[str, Any], now_ns: int) -> tuple[str, ...]:
    ended = shown_time(run["ended_ns"], now_ns) if run["ended_ns"] else "-"
    if run["silent"]:
        ended = f"last seen {shown_time(run['seen_ns'], now_ns)}"
    values = [_value(each) for each in run["values"][:_MOST_VALUES]]
    more = len(run["values"]) - _MOST_VALUES
    return (
        cell(f"{run['group']}/{run['run']}" if run["group"] else run["run"]),
        cell(run["state"], "?"),
        shown_time(run["began_ns"], now_ns) if run["began_ns"] else "?",
        ended,
        str(len(run["nodes"])),
        cell(run["world_size"], "?"),
        cell(run["step"], "-"),
        ", ".join(values) + (f" and {more} more" if more > 0 else ""),
    )


def _value(value: Mapping[str, Any]) -> str:
    name = shown.name(cell(value["name"]), cell(value["split"]))
    return f"{name} {shown.logged({'value': value['last']})}"
