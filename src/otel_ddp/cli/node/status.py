"""otel-ddp status: the runs, ranks and GPUs of this node, also while no agent runs."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterable, Mapping

from otel_ddp.cli.node.gpus import gpu_lines
from otel_ddp.cli.options import add_directory_option, find_places
from otel_ddp.cli.text import cell, dated, integer, marked, number, print_answer
from otel_ddp.errors import ConfigError
from otel_ddp.history.terminal import shown_time
from otel_ddp.identity import addresses
from otel_ddp.journal.process_state import ProcessState, world_of
from otel_ddp.journal.survey import Survey, of_run, survey

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
        found.unreadable.append(missing)
    if options.json:
        return print_answer(json.dumps(found.to_json(), indent=2))
    shown = lines(found, time.time_ns(), agent=conf.agent, named=bool(conf.directory))
    return print_answer("\n".join(shown))


def lines(found: Survey, now_ns: int, *, agent: str = "auto", named: bool = True) -> Iterable[str]:
    """What was found, for a terminal.

    *agent* is the value of OTEL_DDP_AGENT. *named*: a directory was named; otherwise only the
    user's own are searched.
    """
    alive = [each for each in found.agents if each["alive"]]
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
    yield from (f"note      {cell(why)}" for why in found.unreadable)
    runs: dict[tuple[str, str], list[ProcessState]] = {}
    # Runs are shown in the order in which their first process started.
    for process in found.processes:
        runs.setdefault(process.of_run, []).append(process)
    if not runs:
        yield "no runs" if named else "no runs of this user"
    grafana = next(filter(None, (cell(each.get("grafana")) for each in alive)), "")
    for of, processes in runs.items():
        yield ""
        yield from _run_lines(found, of, processes, grafana, now_ns)
    for each in alive:
        yield from gpu_lines(each)


def _run_lines(
    found: Survey, run: tuple[str, str], processes: list[ProcessState], grafana: str, now_ns: int
) -> Iterable[str]:
    """One run: its ranks, its best values, and what the agent has found of it."""
    yield from _table(run, processes, now_ns)
    if board := addresses.board(grafana, "Run", dict(zip(("group", "run"), run, strict=True))):
        yield f"  board {board}"
    yield from best_lines(processes, now_ns)
    yield from (f"  ! {sentence}" for sentence in duplicate_ranks(found, run))
    for note in found.notes:
        if of_run(note) == run:
            yield f"  ! {cell(note.get('sentence'), '?')}"
    for verdict in found.verdicts:
        if of_run(verdict["who"]) == run:
            yield f"  {marked(verdict, now_ns)}"
    for verdict in found.past:
        over = verdict.get("since_ns") and verdict.get("until_ns")
        if of_run(verdict["who"]) == run and over:
            # From when to when, and what it has cost.
            yield f"  - {dated(verdict, now_ns)}"
    for agent in found.agents:
        for each in agent["insufficient"]:
            # Why it cannot tell which rank the others of this run wait for.
            if of_run(each) == run:
                yield f"  stragglers: {cell(each.get('why'), '?')}"


def _table(run: tuple[str, str], processes: list[ProcessState], now_ns: int) -> Iterable[str]:
    """One run: a heading, and one row for each process, with its role if the roles differ."""
    group, name = (cell(each) for each in run)
    roles = {cell(each.job_type) for each in processes}
    parts = (group and f"group {group}", *(roles if len(roles) == 1 else ()))
    yield ", ".join((f"run {name or '?'}", *filter(None, parts), _of_world(processes)))
    widest = min(max(map(len, roles)), _WIDEST_ROLE) if len(roles) > 1 else 0
    yield _columns(_HEADS, "job_type", widest)
    # Processes without a rank last, and the attempts of a rank in their order.
    for each in sorted(processes, key=lambda one: (one.rank is None, one.rank or 0)):
        yield _columns(_row(each, now_ns), cell(each.job_type, "-"), widest)


def _of_world(processes: list[ProcessState]) -> str:
    """How many of the ranks that train together are on this node."""
    world = world_of(processes)
    if world is None:
        return "world ?"
    here = {
        each.rank
        for each in processes
        if each.world_size in (None, world) and each.rank is not None
    }
    return f"{len(here)} of {world} ranks here" if len(here) < world else f"world {world}"


def unserved(found: Survey) -> Iterable[str]:
    """A sentence for each place whose processes wait for an agent that has not started."""
    for each in found.unserved:
        count, directory = each["processes"], cell(each["directory"])
        processes = f"{count} processes run" if count > 1 else "a process runs"
        if last_line := cell(each["agent_log"]):
            why = f"{directory}/agent.log ends with: {last_line}"
        else:
            why = "the training's first lines of output may say why"
        yield (
            f"{processes}, but no agent has started (which is right after OTEL_DDP_AGENT=off); "
            f"{why}; try `otel-ddp agent --dir {shlex.quote(directory)}`"
        )


def duplicate_ranks(found: Survey, run: tuple[str, str] | None = None) -> Iterable[str]:
    """A sentence for each rank that several living processes claim."""
    for each in found.doubled:
        if run in (None, of_run(each)):
            yield (
                f"pids {' and '.join(map(str, each['pids']))} all report as rank {each['rank']} of "
                f"run {cell(each['run'], '?')}, and the metrics show only one of them: give each "
                "launch an OTEL_DDP_RUN of its own, or leave it out"
            )


def best_lines(processes: Iterable[ProcessState], now_ns: int) -> Iterable[str]:
    """A line for the best value of each name, those that were not trained on first."""
    # A later attempt goes on with the summary of an earlier one.
    names = {
        (cell(row.get("name"), "?"), cell(row.get("split"))): row
        for each in processes
        for row in each.summary or ()
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


def _row(each: ProcessState, now_ns: int) -> tuple[str, ...]:
    remarks = []
    if each.reason:
        remarks.append(cell(each.reason))
    if each.state == "killed":
        remarks.append("ended without a report")
    if each.lost:
        remarks.append(f"{each.lost} records lost")
    if not each.settled and not each.ended:
        remarks.append("waits for its process group")
    return (
        cell(each.rank, "?"),
        cell(each.local_rank, "?"),
        cell(each.node, "?"),
        cell(each.pid, "?"),
        cell(each.state, "?"),
        cell(each.step, "-"),
        cell(each.phase, "-"),
        ago(max(0.0, (now_ns - each.phase_since_ns) / 1e9)),
        *remarks,
    )


def ago(seconds: float) -> str:
    """For how long, in one unit."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
