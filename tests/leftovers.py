"""Ends what tests have started: every process that carries a mark among its variables.

Groups and parents do not tell: torchrun gives each rank a session of its own, an agent belongs to
no process at all, and both outlive a test process that is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Inherited by all that a test process starts.
TESTS = "STARTED_BY_TESTS"
# And by all that it starts on one node.
NODE = "STARTED_ON_NODE"
# An agent that a process has started by itself has this as well.
_AGENT = b"_OTEL_DDP_IS_AGENT="
_PATIENCE_S = 180.0


def living(name: str, value: str, *, agents: bool = True) -> dict[int, str]:
    """The command lines of the processes that were started with this variable, by process id."""
    mark = f"{name}={value}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # A process that is gone, a zombie or one of another user has no variables to read.
        with contextlib.suppress(OSError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if mark in variables and (agents or not any(v.startswith(_AGENT) for v in variables)):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(folder.name)] = command.decode(errors="replace")[:200]
    return found


def wait(name: str, value: str) -> dict[int, str]:
    """Give them time to end by themselves; those that do not."""
    deadline = time.monotonic() + _PATIENCE_S
    while (found := living(name, value)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def end(name: str, value: str, *, agents: bool = True) -> None:
    """Kill them all, and those that they start meanwhile."""
    deadline = time.monotonic() + _PATIENCE_S
    while (found := living(name, value, agents=agents)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


@contextmanager
def watched(mark: str) -> Iterator[None]:
    """However this process ends, killed or not, what carries the mark ends soon after."""
    with subprocess.Popen(
        # Without the site packages: it needs none.
        [sys.executable, "-S", __file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ):
        # Leaving the block closes its input, and waits for it. So does the end of this process.
        yield


def main() -> None:
    sys.stdin.read()
    end(TESTS, sys.argv[1])


if __name__ == "__main__":
    main()
