"""otel-ddp stacks: shows the Python stacks of ranks, without stopping them.

Those of this node are asked without an agent. A rank of another node is asked by the agent here, if
that leads the run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from otel_ddp import settings
from otel_ddp.agent.verdicts.answers import AskedProcess, ask
from otel_ddp.cli.node import agent_page
from otel_ddp.cli.options import add_directory_option, find_places
from otel_ddp.cli.text import cell, mappings
from otel_ddp.errors import ConfigError
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import survey

# The question crosses the link, and the process has its time to answer.
_ELSEWHERE_S = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rank",
        type=int,
        action="append",
        help="only this rank; may be given several times. On the node of rank 0 also one of "
        "another node",
    )
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    try:
        conf, places, missing = find_places(options.dir)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    found = ask((path for place in places for path in place.journals()), options.rank)
    for each in found:
        print("\n".join(lines(each)))
    answered = all(each.evidence.answered for each in found)
    elsewhere = {*(options.rank or ())} - {each.rank for each in found}
    others = [*_of_other_nodes(conf, places, elsewhere)] if elsewhere else []
    for other in others:
        print("\n".join(_told_lines(other)))
    if not (found or others):
        which = "no such rank" if options.rank else "no rank"
        print(f"{which} runs on this node" + (f": {missing}" if missing else ""))
        print("".join(f"{cell(look)}\n" for look in survey(places).looks()), end="")
        return 1
    return 0 if answered and not any(each.get("why") for each in others) else 1


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
