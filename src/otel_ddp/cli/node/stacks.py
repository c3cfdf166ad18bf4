"""otel-ddp stacks: shows the Python stacks of ranks, without stopping them.

Those of this node are asked without an agent. A rank of another node is asked by the agent here, if
that leads the run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

from otel_ddp import settings
from otel_ddp.agent.verdicts.answers import AskedProcess, ask
from otel_ddp.cli.node import agent_page
from otel_ddp.cli.options import add_directory_option, find_places
from otel_ddp.cli.text import cell, mappings, print_json
from otel_ddp.errors import ConfigError
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import survey

# The question crosses the link, and the process has its time to answer.
_ELSEWHERE_S = 15.0

SCHEMA = 1
"""The number of its JSON; docs/json.md describes each key."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rank",
        type=int,
        action="append",
        help="only this rank; may be given several times. On the node of rank 0 also one of "
        "another node",
    )
    parser.add_argument("--json", action="store_true", help="the same as JSON, for programs")
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    try:
        found = gather(options.dir, options.rank or ())
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    status = 0 if found.answered else 1
    if options.json:
        return print_json(document(found)) or status
    for each in found.here:
        print("\n".join(lines(each)))
    for other in found.elsewhere:
        print("\n".join(_told_lines(other)))
    if found.why_none:
        print(found.why_none)
        print("".join(f"{cell(look)}\n" for look in found.looks), end="")
    return status


class Found(NamedTuple):
    """Processes with their stacks."""

    here: list[AskedProcess]
    elsewhere: list[Mapping[str, Any]]
    why_none: str
    """Empty where there is one."""
    looks: list[str]
    """Where other ranks are shown."""

    @property
    def answered(self) -> bool:
        asked = [*(each.evidence.answered for each in self.here)]
        return bool(asked or self.elsewhere) and all(
            (*asked, *(not each.get("why") for each in self.elsewhere))
        )


def gather(directory: str, ranks: Collection[int]) -> Found:
    """All living processes of this node, or those of these ranks; raises ConfigError."""
    conf, places, missing = find_places(directory)
    here = ask((path for place in places for path in place.journals()), ranks)
    missed = {*ranks} - {each.rank for each in here}
    others = [*_of_other_nodes(conf, places, missed)] if missed else []
    if here or others:
        return Found(here, others, "", [])
    which = "no such rank" if ranks else "no rank"
    why = f"{which} runs on this node" + (f": {missing}" if missing else "")
    return Found([], [], why, survey(places).looks())


def document(found: Found) -> dict[str, Any]:
    """What --json prints. `node` is empty for this one."""
    return {
        "schema": SCHEMA,
        "processes": [
            *(_row_json(each, "", each.to_json()) for each in found.here),
            *(_row_json(e["process"], e["process"].node, e) for e in found.elsewhere),
        ],
        "why": found.why_none,
        "look": found.looks,
    }


def _row_json(
    process: AskedProcess | ProcessState, node: str, told: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "group": process.group or "",
        "run": process.run or "",
        "node": node,
        "rank": process.rank,
        "pid": process.pid,
        "why": told.get("why") or "",
        "threads": told.get("threads") or [],
    }


def _of_other_nodes(
    conf: settings.Settings, places: list[Place], ranks: Collection[int]
) -> Iterator[Mapping[str, Any]]:
    allowed = agent_page.credentials(conf.web_config)
    for place in places:
        living = [each for each in survey([place]).processes if not each.ended]
        for each in living:
            if each.rank not in ranks or (place.directory / each.journal).exists():
                continue
            query = {"group": each.group, "run": each.run, "rank": str(each.rank)}
            answer = agent_page.ask(
                place, allowed, "stacks", post=True, answer_s=_ELSEWHERE_S, **query
            )
            told = {"why": answer} if isinstance(answer, str) else _row(answer, each)
            yield {**told, "process": each}


def _row(answer: Mapping[str, Any], process: ProcessState) -> Mapping[str, Any]:
    rows = mappings(answer.get("processes"))
    return next((row for row in rows if row.get("rank") == process.rank), {"why": "no answer"})


def _told_lines(told: Mapping[str, Any]) -> Iterator[str]:
    process: ProcessState = told["process"]
    group = f", group {cell(process.group)}" if process.group else ""
    yield (
        f"rank {process.rank}, run {cell(process.run)}{group}, pid {process.pid} on "
        f"{cell(process.node)}"
    )
    for thread in mappings(told.get("threads")):
        yield f"  thread {cell(thread.get('name'), '?')}"
        for frame in mappings(thread.get("frames")):
            at = f"{cell(frame.get('file'))}:{cell(frame.get('line'))}"
            yield f"    {cell(frame.get('function'))} ({at})"
    if why := cell(told.get("why")):
        yield f"  {why}"
    yield ""


def lines(each: AskedProcess) -> Iterator[str]:
    """One process, for a terminal."""
    yield (
        f"rank {'?' if each.rank is None else each.rank}, run {cell(each.run)}"
        + (f", group {cell(each.group)}" if each.group else "")
        + f", pid {each.pid}"
        + (f": {each.state}" if each.state else "")
    )
    for name, found in each.stacks:
        yield f"  thread {cell(name)}"
        for frame in found:
            yield f"    {cell(frame.function)} ({cell(frame.file)}:{frame.line})"
    if why := each.why_no_answer:
        yield f"  {why}"
        # Unless the kernel knows the process, its number may be that of another one.
        if each.evidence.kernel:
            yield (
                f"  from outside: `py-spy dump --nonblocking --pid {each.pid}` (pip install "
                "py-spy), as root, or in a container with the capability SYS_PTRACE"
            )
    yield ""
