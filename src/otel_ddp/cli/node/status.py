"""otel-ddp status: the runs, ranks and GPUs of this node, also while no agent runs."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from otel_ddp.cli.options import add_directory_option, find_places
from otel_ddp.cli.text import (
    cell,
    dated,
    integer,
    mapping,
    mappings,
    marked,
    number,
    padded,
    print_answer,
    print_json,
)
from otel_ddp.errors import ConfigError
from otel_ddp.identity import addresses
from otel_ddp.journal.process_state import ProcessState, world_of
from otel_ddp.journal.survey import Survey, of_run, survey

SCHEMA = 1
"""The number of its JSON; docs/json.md describes each key."""

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
        return print_json({"schema": SCHEMA, **found.to_json()})
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
        if told := cell(each.get("notify")):
            yield f"notify    {told}"
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
    """One run: its ranks, and what the agent has found of it."""
    yield from table(run, processes, now_ns)
    for link in found.links:
        if of_run(link) == run:
            yield f"  {cell(link.get('sentence'), '?')}"
    if board := addresses.board(grafana, "Run", dict(zip(("group", "run"), run, strict=True))):
        yield f"  board {board}"
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


def table(run: tuple[str, str], processes: list[ProcessState], now_ns: int) -> Iterable[str]:
    """One run: a heading, and one row for each process, with its role if the roles differ."""
    group, name = (cell(each) for each in run)
    roles = {cell(each.job_type) for each in processes}
    parts = (group and f"group {group}", *(roles if len(roles) == 1 else ()))
    yield ", ".join((f"run {name or '?'}", *filter(None, parts), _of_world(processes)))
    # Processes without a rank last, and the attempts of a rank in their order.
    ordered = sorted(processes, key=lambda one: (one.rank is None, one.rank or 0))
    rows = [_HEADS, *(_row(each, now_ns) for each in ordered)]
    shown = rows if len(roles) > 1 else [(row[0], *row[2:]) for row in rows]
    yield from (f"  {line}" for line in padded(shown))


def _of_world(processes: list[ProcessState]) -> str:
    """How many of the ranks that train together are on this node, or known to its agent."""
    world = world_of(processes)
    if world is None:
        return "world ?"
    here = {
        each.rank
        for each in processes
        if each.world_size in (None, world) and each.rank is not None
    }
    if len(here) == world:
        return f"world {world}"
    nodes = {each.node for each in processes}
    return f"{len(here)} of {world} ranks {'here' if len(nodes) == 1 else 'known here'}"


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


def duplicate_ranks(found: Survey, run: tuple[str, str]) -> Iterable[str]:
    """A sentence for each rank that several living processes claim."""
    for each in found.doubled:
        if of_run(each) == run:
            yield (
                f"pids {' and '.join(map(str, each['pids']))} all report as rank {each['rank']} of "
                f"run {cell(each['run'], '?')}, and the metrics show only one of them: give each "
                "launch an OTEL_DDP_RUN of its own, or leave it out"
            )


_HEADS = ("rank", "job_type", "local", "node", "pid", "state", "step", "phase", "since", "")


def _row(each: ProcessState, now_ns: int) -> tuple[str, ...]:
    remarks = (
        cell(each.reason),
        "ended without a report" if each.state == "killed" else "",
        f"{each.lost} records lost" if each.lost else "",
        "" if each.settled or each.ended else "waits for its process group",
    )
    return (
        cell(each.rank, "?"),
        cell(each.job_type, "-"),
        cell(each.local_rank, "?"),
        cell(each.node, "?"),
        cell(each.pid, "?"),
        cell(each.state, "?"),
        cell(each.step, "-"),
        cell(each.phase, "-"),
        ago(max(0.0, (now_ns - each.phase_since_ns) / 1e9)),
        " ".join(filter(None, remarks)),
    )


def ago(seconds: float) -> str:
    """For how long, in one unit."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


# -- GPUs

# A driver keeps a part of each board's memory for itself.
_IDLE_SHARE = 0.05
_WIDEST_CELL = 60
_GPU_HEADS = ("gpu", "name", "rank", "busy", "memory", "power", "temp", "throttled by")
# Remarks that tell only of a missing driver, as on any node without GPUs: the doctor shows them.
NO_DRIVER_REMARKS = ("There is no NVIDIA driver", "The NVIDIA kernel driver is not loaded")


def gpu_lines(agent: Mapping[str, Any]) -> Iterable[str]:
    """A table of the GPUs of one agent's node, and the agent's remarks on them."""
    gpus = mappings(agent.get("gpus"))
    remarks = gpu_remarks(agent)
    if not gpus:
        remarks = [each for each in remarks if not each.startswith(NO_DRIVER_REMARKS)]
    if not gpus and not remarks:
        return
    yield ""
    driver = cell(agent.get("gpu_driver"))
    yield ", ".join(filter(None, (f"GPUs of {cell(agent.get('node'), '?')}", driver)))
    if gpus:
        runs = {cell(mapping(each.get("labels")).get("run")) for each in gpus} - {""}
        rows = [_GPU_HEADS, *(gpu_row(each, len(runs) > 1) for each in gpus)]
        yield from (f"  {line}" for line in padded(rows))
    yield from (f"  ! {each}" for each in remarks)


def gpu_remarks(agent: Mapping[str, Any]) -> list[str]:
    """What the agent remarks on its GPUs."""
    remarks = agent.get("gpu_remarks")
    return [cell(each, "?") for each in remarks] if isinstance(remarks, list) else []


def gpu_row(each: Mapping[str, Any], several_runs: bool) -> tuple[str, ...]:
    """Its index, name, rank, busy share, memory, power, temperature, and why it is throttled."""
    busy, celsius = number(each.get("busy_ratio")), number(each.get("temperature_c"))
    throttled = each.get("throttled")
    reasons = throttled if isinstance(throttled, list) else ()
    row = (
        cell(each.get("index"), "?"),
        cell(each.get("name"), "?"),
        gpu_user(each, several_runs),
        "-" if busy is None else f"{busy:.0%}",
        _share(each.get("used_bytes"), each.get("limit_bytes"), 1 << 30, "GiB", 1),
        _share(each.get("power_w"), each.get("power_limit_w"), 1, "W", 0),
        "-" if celsius is None else f"{celsius:.0f} °C",
        ", ".join(cell(reason, "?") for reason in reasons) or "-",
    )
    return tuple(text[:_WIDEST_CELL] for text in row)


def gpu_user(gpu: Mapping[str, Any], several_runs: bool) -> str:
    """The rank that uses a GPU: `3`, `3 of run x` if there are several runs, `free` and so on."""
    labels = mapping(gpu.get("labels"))
    run = cell(labels.get("run"), "?")
    if rank := cell(labels.get("rank")):
        return f"{rank} of run {run}" if several_runs else rank
    if "run" in labels:
        return f"shared by run {run}"
    # Other processes, or several runs at once. In a container the driver may tell of no process,
    # but of the memory that they hold.
    used, limit = number(gpu.get("used_bytes")), number(gpu.get("limit_bytes"))
    held = used is not None and limit is not None and used > _IDLE_SHARE * limit
    if held or integer(gpu.get("processes")):
        return "others"
    # A process of another user is not seen on every vendor's boards, but its memory is.
    return "no rank" if used is None else "free"


def _share(part: Any, total: Any, unit: int, name: str, digits: int) -> str:
    """`60.0/80.0 GiB`, or as much of it as is known."""
    used, most = (
        "-" if value is None else f"{value / unit:.{digits}f}"
        for value in (number(part), number(total))
    )
    if used == most == "-":
        return "-"
    return f"{used} {name}" if most == "-" else f"{used}/{most} {name}"
