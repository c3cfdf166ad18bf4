"""otel-ddp stacks: shows the Python stacks of this node's ranks, without stopping them."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from otel_ddp.agent.verdicts.stack_question import StackQuestion, frames
from otel_ddp.cli.directory_option import add_directory_option, find_places
from otel_ddp.cli.text import cell
from otel_ddp.diagnosis.stall.evidence import Evidence
from otel_ddp.errors import ConfigError
from otel_ddp.journal.reader import JournalReader, Unreadable

_ANSWER_S = 2.0
_PY_SPY_S = 20.0
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_STATES = {"T": "stopped by a signal", "t": "held by a debugger", "D": "in uninterruptible I/O"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rank", type=int, action="append", help="only this rank; may be given several times"
    )
    add_directory_option(parser)


class AskedProcess:
    """A living process that was asked for its stacks."""

    def __init__(self, reader: JournalReader) -> None:
        rank = reader.identity.get("global_rank")
        self.rank = rank if isinstance(rank, int) else None
        self.run = reader.identity.get("run")
        self.group = reader.identity.get("group")
        self.pid = reader.pid
        self._question = StackQuestion(reader.path, reader.pid, reader.start_ticks)
        self.can_answer = self._question.ask("where", time.time_ns())
        self.evidence = Evidence()

    def is_done(self) -> bool:
        """Whether it has answered, or will not."""
        self.evidence = self._question.poll(time.time_ns())
        return self.evidence.answered or not self.can_answer

    @property
    def threads(self) -> list[Any]:
        found = self._question.answer.get("threads")
        return found if isinstance(found, list) else []


def run(options: argparse.Namespace) -> int:
    try:
        _, places, missing = find_places(options.dir)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    found = list(_ask((path for place in places for path in place.journals()), options.rank))
    if not found:
        which = "no such rank" if options.rank else "no rank"
        print(f"{which} runs on this node" + (f": {missing}" if missing else ""))
        return 1
    deadline = time.monotonic() + _ANSWER_S
    # All were asked at once, so that the stacks are those of one moment.
    waiting = found
    while waiting and time.monotonic() < deadline:
        time.sleep(0.01)
        waiting = [each for each in waiting if not each.is_done()]
    for each in sorted(found, key=lambda one: (one.rank is None, one.rank or 0)):
        print("\n".join(lines(each)))
    return 0 if all(each.evidence.answered for each in found) else 1


def _ask(journals: Iterable[Path], ranks: list[int] | None) -> Iterator[AskedProcess]:
    for path in journals:
        try:
            reader = JournalReader(path)
        except Unreadable:
            continue
        try:
            if reader.writer_is_alive() and (
                not ranks or reader.identity.get("global_rank") in ranks
            ):
                yield AskedProcess(reader)
        finally:
            reader.close()


def lines(each: AskedProcess) -> Iterator[str]:
    """One process, for a terminal."""
    kernel = each.evidence.kernel
    state = _STATES.get(kernel.state, "") if kernel else ""
    yield (
        f"rank {'?' if each.rank is None else each.rank}, run {cell(each.run)}"
        + (f", group {cell(each.group)}" if each.group else "")
        + f", pid {each.pid}"
        + (f": {state}" if state else "")
    )
    if each.evidence.answered:
        yield from _stacks(each.threads)
    else:
        yield f"  {_why_no_answer(each, state)}"
        # Unless the kernel knows the process, its number may be that of another one.
        yield from _from_outside(each.pid) if kernel else ()
    yield ""


def _why_no_answer(each: AskedProcess, state: str) -> str:
    if not each.can_answer:
        return "it does not answer: it has not called otel_ddp.instrument, or is about to end"
    if state:
        return f"it cannot answer: it is {state}"
    return f"no answer within {_ANSWER_S:g} s: C code holds Python's lock (the GIL)"


def _stacks(threads: list[Any]) -> Iterator[str]:
    for thread in threads:
        if not isinstance(thread, Mapping):
            continue
        trains = thread.get("trains") is True and thread.get("main") is not True
        yield f"  thread {cell(thread.get('name')) or '?'}" + ", which trains" * trains
        for frame in frames(dict(thread)):
            yield f"    {cell(frame.function)} ({cell(frame.file)}:{frame.line})"


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
