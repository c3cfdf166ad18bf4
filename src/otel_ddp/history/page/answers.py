"""Answers the page's requests for data of one run, and saves a page that includes its answers."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_ddp.history import directory
from otel_ddp.history.page import columns, runs, static_files
from otel_ddp.history.page.http import Question, as_json
from otel_ddp.history.waits import waits
from otel_ddp.history.whole_run import WholeRun
from otel_ddp.journal.survey import Survey

_MOST_EVENTS = 200
# Limits of a saved page: the number of charts, the points of all lines of a chart together, and the
# characters of a post-mortem.
_SAVED_NAMES, _SAVED_POINTS, _SAVED_TEXT = 60, 8192, 256 * 1024
_SAVED_COLUMNS, _FEWEST_COLUMNS = 512, 32
_SAVED_FILES = 5


def _names(run: WholeRun, question: Question) -> dict[str, Any]:
    return {
        "values": columns.names(run, "value"),
        "node": [columns.described(name) for name in columns.names(run, "node", "counter")],
    }


def _events(run: WholeRun, question: Question) -> dict[str, Any]:
    """The last events, exceptions and checkpoints, latest first.

    If the request has the parameter `like`, only those that contain its text.
    """
    found: list[dict[str, Any]] = [
        {**each._asdict(), "node": run.node_of(history, each.rank)}
        for history in run.histories
        for each in history.events(_MOST_EVENTS, question.text("like")[:200])
        if run.has_events_of(history, each.rank)
    ]
    found.sort(key=lambda each: -each["time_ns"])
    return {"events": found[:_MOST_EVENTS]}


def _waits(run: WholeRun) -> dict[str, Any]:
    return {"phases": columns.SHOWN_PHASES, **waits(run)}


ANSWERS: Mapping[str, Callable[[WholeRun, Question], dict[str, Any]]] = {
    "names": _names,
    "values": lambda run, question: columns.columns_of(run, question, "value"),
    "node": lambda run, question: columns.columns_of(run, question, "node", "counter"),
    "steps": columns.grid,
    "waits": lambda run, question: _waits(run),
    "events": _events,
}

# -- saved in one file


def saved(run: WholeRun, reports: Sequence[Any] = ()) -> str:
    """The page of a run as HTML that includes the answers to all its requests."""
    names, reports = _names(run, Question("names")), reports[:_SAVED_FILES]
    texts = {
        each["name"]: directory.postmortem(Path(each["path"]).parent, each["name"]) or ""
        for each in reports
    }
    shown = {kind: each[:_SAVED_NAMES] for kind, each in names.items()}
    left_out = max(len(names["values"]) - _SAVED_NAMES, 0)
    found = {
        "run": runs.head(run, Survey()),
        "ranks": runs.ranks(run, Survey()),
        "names": {**shown, "left_out": left_out},
        "values": _pictures(run, shown["values"], "value"),
        "node": _pictures(run, [each["name"] for each in shown["node"]], "node", "counter"),
        "steps": columns.grid(run, Question("steps", {"columns": [str(_SAVED_COLUMNS)]})),
        "waits": _waits(run),
        "events": _events(run, Question("events")),
        "postmortems": {"postmortems": reports},
        "postmortem": {name: text[:_SAVED_TEXT] for name, text in texts.items()},
    }
    return static_files.saved(gzip.compress(as_json(200, found).body, 9, mtime=0))


def _pictures(run: WholeRun, names: Sequence[str], *kinds: str) -> dict[str, Any]:
    """For each name, the data of its chart. A chart of many lines has fewer points per line."""
    found = {}
    for name in names:
        lines = sum(len(each.series(kind, name)) for each in run.histories for kind in kinds)
        points = max(min(_SAVED_COLUMNS, _SAVED_POINTS // max(lines, 1)), _FEWEST_COLUMNS)
        over = ["ranks"] if kinds == ("value",) else []
        query = {"name": [name], "columns": [str(points)], "over": over}
        found[name] = columns.columns_of(run, Question("values", query), *kinds)
    return found
