"""otel-ddp goodput: shows where the time of a run went, over all its attempts."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from typing import Any

from otel_ddp import shown
from otel_ddp.cli.command import add_run_argument, cell, history_directory, show
from otel_ddp.history.directory import NotFound, find_run
from otel_ddp.history.goodput import goodput_of
from otel_ddp.history.terminal import aligned, shown_time
from otel_ddp.vocabulary.words import TIME_CAUSES

SCHEMA = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show where the time of all ranks of a run went, over all its attempts: the productive "
        "share, and the time lost to each cause."
    )
    add_run_argument(parser)
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")


def run(options: argparse.Namespace) -> int:
    found = document(options.which or "")
    return show(found, _lines(found), as_json=options.json)


def document(which: str, *, paths: bool = True) -> dict[str, Any]:
    """The goodput of a run as JSON, with the arguments and errors of `find_run`."""
    with find_run(which, history_directory(), paths=paths) as run:
        found = goodput_of(run)
        of = {"schema": SCHEMA, "group": run.group, "run": run.name, "look": run.look}
    if found is None:
        raise NotFound(
            f"{_title(of)} has no goodput: it made no step, or an earlier version of otel_ddp "
            "recorded it."
        )
    return {**of, "goodput": found}


def _title(of: Mapping[str, Any]) -> str:
    return "/".join(filter(None, (of["group"], of["run"])))


def _lines(answer: Mapping[str, Any]) -> Iterator[str]:
    """The document as lines for a terminal."""
    found = answer["goodput"]
    total_s = found["rank_s"]
    yield (
        f"{cell(_title(answer))}: {shown.share(found['share'])} of the {shown.seconds(total_s)} of "
        f"all ranks together were productive"
    )
    if answer["look"]:
        yield answer["look"]
    yield ""
    rows = [("share", "time", "what")]
    for cause, spent_s in found["seconds"].items():
        rows.append((shown.share(spent_s / total_s), shown.seconds(spent_s), TIME_CAUSES[cause]))
        if cause == "late_rank":
            rows += [
                (shown.share(late_s / total_s), shown.seconds(late_s), f"  {who}")
                for who, late_s in sorted(found["late"].items(), key=lambda each: -each[1])[:10]
            ]
    yield from aligned(rows, right=("share", "time"))
    if len(attempts := found["attempts"]) > 1:
        yield ""
        # What to show for an attempt whose end no agent saw: the last one goes on, the end of an
        # earlier one is unknown.
        ends = ["-"] * (len(attempts) - 1) + ["goes on"]
        yield from aligned([_HEADS, *map(_attempt, attempts, ends)], right=_HEADS[2:6])


_HEADS = ("attempt", "began", "back after", "from step", "to step", "done twice", "ended", "why")


def _attempt(answer: Mapping[str, Any], no_end: str) -> tuple[str, ...]:
    now_ns = time.time_ns()
    words = [cell(answer.get(key), "-") for key in ("first_step", "last_step")]
    twice = str(answer["repeated_steps"] or "-")
    began = shown_time(answer["began_ns"], now_ns)
    ended = cell(answer.get("state"), no_end)
    if "ended_ns" in answer:
        ended += f" {shown_time(answer['ended_ns'], now_ns)}"
    back = shown.seconds(answer.get("back_s"))
    return str(answer["attempt"]), began, back, *words, twice, ended, cell(answer.get("why"))
