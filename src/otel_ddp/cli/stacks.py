"""otel-ddp stacks: what the Python threads of this node's ranks are at, without stopping them."""

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
from otel_ddp.cli import where
from otel_ddp.diagnosis.evidence import Evidence
from otel_ddp.errors import ConfigError
from otel_ddp.journal.reader import JournalReader, Unreadable

_PATIENCE_S = 2.0
_PY_SPY_S = 20.0
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_STATES = {"T": "stopped by a signal", "t": "held by a debugger", "D": "in uninterruptible I/O"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", type=int, action="append", help="only this rank; may be repeated")
    where.argument(parser)


class Asked:
    """A living process that was asked."""

    def __init__(self, reader: JournalReader) -> None:
        rank = reader.identity.get("global_rank")
        self.rank = rank if isinstance(rank, int) else None
        self.run = reader.identity.get("run")
        self.group = reader.identity.get("group")
        self.pid = reader.pid
        self._probe = StackQuestion(reader.path, reader.pid, reader.start_ticks)
        self.heard = self._probe.ask("where", time.time_ns())
        self.known = Evidence()

    def answered(self) -> bool:
        """Whether there is nothing left to wait for."""
        self.known = self._probe.poll(time.time_ns())
        return self.known.heard or not self.heard

    @property
    def threads(self) -> list[Any]:
        found = self._probe.answer.get("threads")
        return found if isinstance(found, list) else []


def run(asked: argparse.Namespace) -> int:
    try:
        _, places, missing = where.look(asked.dir)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    found = list(_living((path for place in places for path in place.journals()), asked.rank))
    if not found:
        told = "no such rank lives on this node" if asked.rank else "no rank lives on this node"
        print(f"{told}: {missing}" if missing else told)
        return 1
    deadline = time.monotonic() + _PATIENCE_S
    # Asked all at once, so that they are seen at one moment.
    open_still = found
    while open_still and time.monotonic() < deadline:
        time.sleep(0.01)
        open_still = [each for each in open_still if not each.answered()]
    for each in sorted(found, key=lambda one: (one.rank is None, one.rank or 0)):
        print("\n".join(lines(each)))
    return 0 if all(each.known.heard for each in found) else 1


def _living(journals: Iterable[Path], ranks: list[int] | None) -> Iterator[Asked]:
    for path in journals:
        try:
            reader = JournalReader(path)
        except Unreadable:
            continue
        try:
            if reader.writer_lives() and (not ranks or reader.identity.get("global_rank") in ranks):
                yield Asked(reader)
        finally:
            reader.close()


def lines(each: Asked) -> Iterator[str]:
    """One process, for a terminal."""
    kernel = each.known.kernel
    state = _STATES.get(kernel.state, "") if kernel else ""
    yield (
        f"rank {'?' if each.rank is None else each.rank}, run {_clean(each.run)}"
        + (f", group {_clean(each.group)}" if each.group else "")
        + f", pid {each.pid}"
        + (f": {state}" if state else "")
    )
    if each.known.heard:
        yield from _stacks(each.threads)
    else:
        yield f"  {_why_silent(each, state)}"
        # Without the kernel's word the number may be that of another process.
        yield from _from_outside(each.pid) if kernel else ()
    yield ""


def _why_silent(each: Asked, state: str) -> str:
    if not each.heard:
        return "nobody answers in it: it has not called otel_ddp.instrument, or is about to end"
    if state:
        return f"it cannot answer: it is {state}"
    return f"no answer within {_PATIENCE_S:g} s: C code holds Python's lock (the GIL)"


def _stacks(threads: list[Any]) -> Iterator[str]:
    for thread in threads:
        if not isinstance(thread, Mapping):
            continue
        trains = thread.get("trains") is True and thread.get("main") is not True
        yield f"  thread {_clean(thread.get('name')) or '?'}" + ", which trains" * trains
        for frame in frames(dict(thread)):
            yield f"    {_clean(frame.function)} ({_clean(frame.file)}:{frame.line})"


def _from_outside(pid: int) -> Iterator[str]:
    """What py-spy sees, which asks nobody in the process."""
    program = shutil.which("py-spy")
    if program is None:
        yield "  py-spy shows it from outside: `pip install py-spy`, then this command again"
        return
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PY_SPY_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        yield f"  py-spy failed: {_clean(error)}"
        return
    if done.returncode == 0:
        yield from (f"  {_clean(line)}" for line in done.stdout.splitlines())
        return
    yield from (f"  py-spy: {_clean(line)}" for line in done.stderr.splitlines()[-3:])
    yield f"  {_permission()}"


def _permission() -> str:
    """Who may look into another process here."""
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


def _clean(value: Any) -> str:
    """Anything as one line that does nothing to a terminal."""
    text = "" if value is None else str(value)
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text[:1000]
    )
