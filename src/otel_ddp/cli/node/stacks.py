"""otel-ddp stacks: shows the Python stacks of this node's ranks, without stopping them."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from otel_ddp.agent.verdicts.answers import AskedProcess, ask
from otel_ddp.cli.options import add_directory_option, find_places
from otel_ddp.cli.text import cell
from otel_ddp.errors import ConfigError

_PY_SPY_S = 20.0
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")


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
        yield from _from_outside(each.pid) if each.evidence.kernel else ()
    yield ""


def _from_outside(pid: int) -> Iterator[str]:
    """The stacks that py-spy reads, which needs no answer of the process."""
    program = shutil.which("py-spy")
    if program is None:
        yield "  py-spy can show it from outside: `pip install py-spy`, then run this command again"
        return
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PY_SPY_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield f"  py-spy failed: {cell(error)}"
        return
    if done.returncode == 0:
        yield from (f"  {cell(line)}" for line in done.stdout.splitlines())
        return
    yield from (f"  py-spy: {cell(line)}" for line in done.stderr.splitlines()[-3:])
    yield f"  {_permission()}"


def _permission() -> str:
    """What permits py-spy to read another process here."""
    try:
        scope = _PTRACE_SCOPE.read_text().strip()
    except OSError:
        scope = "0"
    if scope != "0":
        return (
            f"kernel.yama.ptrace_scope is {scope} here: run this as root, or set it to 0; "
            "in a container, add the capability SYS_PTRACE"
        )
    return "run this as the user of the training, or as root; in a container, add SYS_PTRACE"
