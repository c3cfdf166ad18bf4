"""Profiles of a process here that a person asks for on the lead's node.

`otel-ddp profile` records it, in a process of its own: to read a trace takes seconds and memory,
which the agent has not. The trace stays on this node. What goes to the lead is the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from otel_ddp.agent.link import limits
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.verdicts.journal_source import JournalSource
from otel_ddp.history.terminal import printable

# As many ranks as one command profiles.
_MOST_OPEN = 2
# Nothing deletes a trace, and a lead may be wrong: so many for one attempt of a run.
_MOST = 64
_BUSY = "two profiles for rank 0's node are under way on its node"
_TOO_MANY = f"its node has made {_MOST} profiles for rank 0's node: profile it there"
_TOO_LARGE = "its table is too large to be sent here (over 1 MiB): profile it on its node"
_MOST_ERROR_BYTES = 64 * 1024
_ROOT = str(Path(__file__).parents[4])
# Appended, so that nothing beside the package shadows another module.
_CODE = f"import sys; sys.path.append({_ROOT!r}); from otel_ddp.cli import main; sys.exit(main())"


def _start(arguments: Sequence[str], out: IO[bytes], error: IO[bytes]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _CODE, *arguments]
    return subprocess.Popen(command, cwd="/", stdin=subprocess.DEVNULL, stdout=out, stderr=error)


class _Open(NamedTuple):
    number: int
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    error: IO[bytes]


class ProfilesHere:
    """One a run that is led by another agent. Called from the agent's loop."""

    def __init__(self, start: Callable[..., Any] = _start) -> None:
        self._start = start
        self._open: list[_Open] = []
        self._done: list[wire.Told] = []
        self._count = 0

    def ask(self, number: int, source: JournalSource, steps: int) -> None:
        """The lead asks for a profile of this process."""
        run = dict(source.labels)["run"]
        if len(self._open) >= _MOST_OPEN or self._count >= _MOST:
            why = _TOO_MANY if self._count >= _MOST else _BUSY
            self._tell(number, json.dumps({"why": why}).encode())
            return
        self._count += 1
        # Closed once they are read.
        out, error = (open(os.memfd_create("profile"), "w+b") for _ in range(2))  # noqa: SIM115
        # The name of a run may begin with a dash.
        where = (f"--dir={source.journal.parent}", f"--run={run}")
        what = (f"--rank={source.global_rank}", f"--steps={steps}", "--alone", "--json")
        try:
            process = self._start(("profile", *where, *what), out, error)
        except OSError as why:
            out.close()
            error.close()
            text = f"its node cannot start a profile: {os.strerror(why.errno or 0)}"
            self._tell(number, json.dumps({"why": text}).encode())
            return
        self._open.append(_Open(number, process, out, error))

    def poll(self) -> bool:
        """Look for answers; whether there is one."""
        for each in list(self._open):
            if each.process.poll() is not None:
                self._open.remove(each)
                self._tell(each.number, _answer(each))
        return bool(self._done)

    def take(self) -> list[wire.Told]:
        """The answers since the last call."""
        done, self._done = self._done, []
        return done

    def stop(self) -> None:
        """The run has no lead any more, or the agent ends."""
        for each in self._open:
            each.process.kill()
            each.process.wait()
            _answer(each)
        self._open.clear()

    def _tell(self, number: int, content: bytes) -> None:
        self._done.append(wire.Told(number=number, content=content))


def _answer(ended: _Open) -> bytes:
    """What it has printed, or why it has not."""
    with ended.out, ended.error:
        ended.out.seek(0)
        if content := ended.out.read(limits.MOST_TOLD_BYTES + 1):
            too_large = len(content) > limits.MOST_TOLD_BYTES
            return json.dumps({"why": _TOO_LARGE}).encode() if too_large else content
        ended.error.seek(0)
        said = ended.error.read(_MOST_ERROR_BYTES).decode(errors="replace").strip()
    last = printable(said.splitlines()[-1]) if said else f"it ended with {ended.process.returncode}"
    return json.dumps({"why": last}).encode()
