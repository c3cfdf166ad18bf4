"""What the page asks about one run, answered out of its histories. A saved page has the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import files
from otel_ddp.history import postmortems, profiles
from otel_ddp.history.page import steps, values
from otel_ddp.history.page.exchange import PACKED, Answer, Question, Refused
from otel_ddp.history.whole_run import WholeRun

_MOST_EVENTS = 500
_MOST_PROFILES, _MOST_OPERATORS = 20, 15
# The agent holds it in memory while it is sent.
_LARGEST_TRACE = 32 * 1024 * 1024


class Beside(NamedTuple):
    """Where lies what belongs to a run, and is in no history."""

    postmortems: Sequence[Path]
    profiles: Path


def names(run: WholeRun, question: Question) -> dict[str, Any]:
    node = values.names(run, "node") + values.names(run, "counter")
    return {
        "values": values.names(run, "value"),
        "node": [{"name": name, **values.described(name)} for name in node],
    }


def events(run: WholeRun, question: Question) -> dict[str, Any]:
    """Log lines, exceptions and checkpoints, the latest first. `more`: there are older ones."""
    most = question.whole("most", 100, 1, _MOST_EVENTS)
    before_ns = question.whole("before_ns", 2**62, 0, 2**62)
    found: list[dict[str, Any]] = [
        {
            **each._asdict(),
            # A browser's numbers are too short for it.
            "time_exact": str(each.time_ns),
            "node": str(history.about.get("node") or ""),
        }
        for history in run.histories
        for each in history.events(most + 1, before_ns, question.text("like")[:200])
    ]
    found.sort(key=lambda each: -each["time_ns"])
    return {"events": found[:most], "more": len(found) > most}


def postmortems_of(run: WholeRun, beside: Beside) -> dict[str, Any]:
    found = postmortems.of_run(beside.postmortems, run.group, run.name)
    return {"postmortems": [each.described() for each in found]}


def profiles_of(run: WholeRun, beside: Beside) -> dict[str, Any]:
    found = profiles.of_run(run.group, run.name, beside.profiles)[:_MOST_PROFILES]
    return {"profiles": [each.described(_MOST_OPERATORS) for each in found]}


# Of the histories alone.
ANSWERS: Mapping[str, Callable[[WholeRun, Question], dict[str, Any]]] = {
    "names": names,
    "values": lambda run, question: values.columns_of(run, question, "value"),
    "node": lambda run, question: values.columns_of(run, question, "node", "counter"),
    "steps": steps.grid,
    "events": events,
}
BESIDE: Mapping[str, Callable[[WholeRun, Beside], dict[str, Any]]] = {
    "postmortems": postmortems_of,
    "profiles": profiles_of,
}
PRIVATE = ("compare", "events", "postmortem", "postmortems", "profiles", "trace")


def trace(run: WholeRun, question: Question, beside: Beside) -> Answer:
    """One of the files that `profiles` names."""
    wanted = question.text("path")
    of_run = profiles.of_run(run.group, run.name, beside.profiles)
    path = next((path for each in of_run for path in each.traces if str(path) == wanted), None)
    try:
        content = files.read(path or "", _LARGEST_TRACE + 1)
    except OSError:
        content = b""
    if path is None or not content:
        raise Refused(404, f"there is no trace {wanted[:200]!r}")
    if len(content) > _LARGEST_TRACE:
        raise Refused(413, f"the trace is larger than this page sends: copy {path}")
    headers = {
        "Content-Type": PACKED,
        "Content-Disposition": f'attachment; filename="{path.name}"',
        "Cache-Control": "no-store",
    }
    return Answer(200, headers, content)
