"""otel-ddp status: the runs, ranks and GPUs of this node, also while no agent runs."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from otel_ddp.agent.reading.node_status import survey
from otel_ddp.agent.reading.world_size import World, training_world
from otel_ddp.cli.directory_option import add_directory_option, find_places
from otel_ddp.cli.gpus import gpu_lines
from otel_ddp.cli.text import cell, dated, integer, mappings, marked, number, print_answer
from otel_ddp.errors import ConfigError
from otel_ddp.history.quantities import shown_time
from otel_ddp.identity import boards
from otel_ddp.words import ENDED_STATES

_WIDEST_ROLE = 24
_MOST_BEST = 6
# The sentence where no agent runs, by OTEL_DDP_AGENT.
NO_AGENT = {
    "auto": "none runs: a training process starts one",
    "external": "OTEL_DDP_AGENT=external, but none runs: start `otel-ddp agent` on this node",
    "offline": "none runs: a training process starts one, which sends nothing "
    "(OTEL_DDP_AGENT=offline)",
    "off": "OTEL_DDP_AGENT=off: journals are written, but nothing is exported",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same as JSON, for programs")
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    try:
        conf, places, missing = find_places(options.dir)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    found = survey(places)
    if missing:
        found["unreadable"].append(missing)
    if options.json:
        return print_answer(json.dumps(found, indent=2))
    shown = lines(found, time.time_ns(), agent=conf.agent, named=bool(conf.directory))
    return print_answer("\n".join(shown))


def lines(
    found: Mapping[str, Any], now_ns: int, *, agent: str = "auto", named: bool = True
) -> Iterable[str]:
    """What was found, for a terminal.

    *agent* is the value of OTEL_DDP_AGENT. *named*: a directory was named; otherwise only the
    user's own are searched.
    """
    alive = [each for each in mappings(found.get("agents")) if each.get("alive")]
    for each in alive:
        pid, version = cell(each.get("pid"), "?"), cell(each.get("version"), "?")
        if each.get("starting") is True:
            yield f"agent     pid {pid} is starting"
            continue
        yield f"agent     pid {pid}, version {version}"
        yield f"endpoint  {cell(each.get('scrape'), 'none')}"
        yield f"export    {cell(each.get('export'), 'unknown')}"
        if remark := cell(each.get("remark")):
            yield f"note      {remark}"
    without_agent = list(unserved(found)) if agent in ("auto", "offline") else []
    if not alive and not without_agent:
        yield f"agent     {NO_AGENT[agent]}"
    yield from (f"agent     {sentence}" for sentence in without_agent)
    yield from (f"note      {cell(why)}" for why in found.get("unreadable") or ())
    runs: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    # Runs are shown in the order in which their first process started.
    for each in sorted(mappings(found.get("processes")), key=_started):
        runs.setdefault(_run(each), []).append(each)
    if not runs:
        yield "no runs" if named else "no runs of this user"
    grafana = next(filter(None, (cell(each.get("grafana")) for each in alive)), "")
    for run, processes in runs.items():
        yield ""
        yield from _table(run, processes, now_ns)
        if board := boards.address(grafana, "Run", dict(zip(("group", "run"), run, strict=True))):
            yield f"  board {board}"
        yield from best_lines(processes, now_ns)
        yield from (f"  ! {sentence}" for sentence in duplicate_ranks(found, run))
        yield from (f"  ! {sentence}" for sentence in _run_notes(found, run))
        for verdict in mappings(found.get("verdicts")):
            labels = verdict.get("who")
            if isinstance(labels, Mapping) and _run(labels) == run:
                yield f"  {marked(verdict, now_ns)}"
        yield from (f"  - {sentence}" for sentence in _past(found, run, now_ns))
        for each in alive:
            yield from _not_judged(each, run)
    for each in alive:
        yield from gpu_lines(each)


def _run(labels: Mapping[str, Any]) -> tuple[str, str]:
    """Group and name of a run: several groups may have a run of one name."""
    return cell(labels.get("group")), cell(labels.get("run"), "?")


def _table(run: tuple[str, str], processes: list[Mapping[str, Any]], now_ns: int) -> Iterable[str]:
    """One run: a heading, and one row for each process, with its role if the roles differ."""
    group, name = run
    world = _world(processes)
    roles = {cell(each.get("job_type")) for each in processes}
    parts = (group and f"group {group}", *(roles if len(roles) == 1 else ()))
    yield ", ".join((f"run {name}", *filter(None, parts), _of_world(processes, world)))
    widest = min(max(map(len, roles)), _WIDEST_ROLE) if len(roles) > 1 else 0
    yield _columns(_HEADS, "job_type", widest)
    for each in sorted(processes, key=_by_rank):
        yield _columns(_row(each, now_ns), cell(each.get("job_type"), "-"), widest)


def _world(processes: list[Mapping[str, Any]]) -> int | None:
    """How many ranks train together."""
    worlds = [
        (World(size, each.get("trains") is True), each)
        for each in processes
        if each.get("proxy") is not True and (size := integer(each.get("world_size"))) is not None
    ]
    living = [world for world, each in worlds if each.get("state") not in ENDED_STATES]
    # Among ended processes, those that trained are the training, or else those that were several;
    # of these the newest attempt.
    ended = [
        (world.trains, world.size > 1, _started(each), world.size)
        for world, each in worlds
        if each.get("state") in ENDED_STATES
    ]
    trained, _, _, size = max(ended, default=(False, False, 0, 0))
    return training_world(living, World(size, trained)) or None


def _of_world(processes: list[Mapping[str, Any]], world: int | None) -> str:
    """How many of the ranks that train together are on this node."""
    if world is None:
        return "world ?"
    here = {
        rank
        for each in processes
        if each.get("proxy") is not True
        and each.get("world_size") in (None, world)
        and (rank := integer(each.get("rank"))) is not None
    }
    return f"{len(here)} of {world} ranks here" if len(here) < world else f"world {world}"


def unserved(found: Mapping[str, Any]) -> Iterable[str]:
    """A sentence for each place whose processes wait for an agent that has not started."""
    for each in mappings(found.get("unserved")):
        count, directory = integer(each.get("processes")) or 0, cell(each.get("directory"), "?")
        processes = f"{count} processes run" if count > 1 else "a process runs"
        if last_line := cell(each.get("agent_log")):
            why = f"{directory}/agent.log ends with: {last_line}"
        else:
            why = "the training's first lines of output may say why"
        yield (
            f"{processes}, but no agent has started (which is right after OTEL_DDP_AGENT=off); "
            f"{why}; try `otel-ddp agent --dir {shlex.quote(directory)}`"
        )


def duplicate_ranks(found: Mapping[str, Any], run: tuple[str, str] | None = None) -> Iterable[str]:
    """A sentence for each rank that several living processes claim."""
    for each in mappings(found.get("doubled")):
        name, listed = cell(each.get("run"), "?"), each.get("pids")
        pids = [cell(pid, "?") for pid in listed] if isinstance(listed, list) else []
        if run in (None, _run(each)):
            yield (
                f"pids {' and '.join(pids)} all report as rank {cell(each.get('rank'), '?')} of "
                f"run {name}, and the metrics show only one of them: give each launch an "
                "OTEL_DDP_RUN of its own, or leave it out"
            )


def _run_notes(found: Mapping[str, Any], run: tuple[str, str]) -> Iterable[str]:
    """The agent's sentences on how this run is set up."""
    for each in mappings(found.get("notes")):
        if _run(each) == run:
            yield cell(each.get("sentence"), "?")


def _past(found: Mapping[str, Any], run: tuple[str, str], now_ns: int) -> Iterable[str]:
    """What was found of this run and is over: from when to when, and what it has cost."""
    for each in mappings(found.get("past")):
        labels = each.get("who")
        over = integer(each.get("since_ns")) and integer(each.get("until_ns"))
        if isinstance(labels, Mapping) and _run(labels) == run and over:
            yield dated(each, now_ns)


def _not_judged(agent: Mapping[str, Any], run: tuple[str, str]) -> Iterable[str]:
    """Why the agent cannot tell which rank the others of this run wait for."""
    for each in mappings(agent.get("insufficient")):
        if _run(each) == run:
            yield f"  stragglers: {cell(each.get('why'), '?')}"


def best_lines(processes: Iterable[Mapping[str, Any]], now_ns: int) -> Iterable[str]:
    """A line for the best value of each name, those that were not trained on first."""
    # A later attempt goes on with the summary of an earlier one.
    names = {
        (cell(row.get("name"), "?"), cell(row.get("split"))): row
        for each in processes
        for row in mappings(each.get("summary"))
        if row.get("direction")
    }
    shown = sorted(names.items(), key=lambda item: item[0][1] == "train")
    for (name, split), row in shown[:_MOST_BEST]:
        best = row.get(str(row.get("direction")))
        value = number(best.get("value")) if isinstance(best, Mapping) else None
        if best is None or value is None:
            continue
        step, time_ns = integer(best.get("step")), integer(best.get("time_ns"))
        parts = (
            f"best {name} ({split}): {value:.6g}",
            "" if step is None else f"at step {step}",
            "" if time_ns is None else f"at {shown_time(time_ns, now_ns)}",
        )
        yield "  " + ", ".join(filter(None, parts))
    if len(shown) > _MOST_BEST:
        yield f"  and {len(shown) - _MOST_BEST} further names have a best value: --json has all"


_HEADS = ("rank", "local", "node", "pid", "state", "step", "phase", "since")
_WIDTHS = (6, 6, 16, 8, 10, 10, 14, 10)


def _columns(cells: tuple[str, ...], role: str = "", role_width: int = 0) -> str:
    """One line of the table; the role, if it is shown, follows the rank."""
    padded = [cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=False)]
    if role_width:
        padded.insert(1, role.ljust(max(role_width, len("job_type"))))
    return "  " + " ".join(padded).rstrip() + "".join(f" {cell}" for cell in cells[len(_WIDTHS) :])


def _row(each: Mapping[str, Any], now_ns: int) -> tuple[str, ...]:
    since_ns, lost = integer(each.get("phase_since_ns")), integer(each.get("lost"))
    state = cell(each.get("state"), "?")
    remarks = []
    if reason := cell(each.get("reason")):
        remarks.append(reason)
    if state == "killed":
        remarks.append("ended without a report")
    if lost:
        remarks.append(f"{lost} records lost")
    if not each.get("settled", True) and state not in ENDED_STATES:
        remarks.append("waits for its process group")
    return (
        cell(each.get("rank"), "?"),
        cell(each.get("local_rank"), "?"),
        cell(each.get("node"), "?"),
        cell(each.get("pid"), "?"),
        state,
        cell(each.get("step"), "-"),
        cell(each.get("phase"), "-"),
        "-" if since_ns is None else ago(max(0.0, (now_ns - since_ns) / 1e9)),
        *remarks,
    )


def ago(seconds: float) -> str:
    """For how long, in one unit."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _started(each: Mapping[str, Any]) -> int:
    return integer(each.get("started_ns")) or 0


def _by_rank(each: Mapping[str, Any]) -> tuple[bool, int, int]:
    """Ranks by number, processes without a rank last, and the attempts of a rank by start."""
    rank = integer(each.get("rank"))
    return rank is None, rank or 0, _started(each)
