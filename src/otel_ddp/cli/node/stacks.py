"""otel-ddp stacks: shows the Python stacks of this node's ranks, without stopping them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

from otel_ddp.agent.verdicts.answers import AskedProcess, ask
from otel_ddp.cli.options import add_directory_option, find_places
from otel_ddp.cli.text import cell
from otel_ddp.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rank", type=int, action="append", help="only this rank; may be given several times"
    )
    add_directory_option(parser)


def run(options: argparse.Namespace) -> int:
    try:
        _, places, missing = find_places(options.dir)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    found = ask((path for place in places for path in place.journals()), options.rank)
    if not found:
        which = "no such rank" if options.rank else "no rank"
        print(f"{which} runs on this node" + (f": {missing}" if missing else ""))
        return 1
    for each in found:
        print("\n".join(lines(each)))
    return 0 if all(each.evidence.answered for each in found) else 1


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
