"""A place of journals and an agent of a command's own, which goes with the command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from otel_ddp import files
from otel_ddp.journal.place import Place

_AGENT_ENDS_S = 5.0


def new_directory(prefix: str) -> Path:
    """A new directory, in memory if that is writable."""
    with contextlib.suppress(OSError):
        return Path(tempfile.mkdtemp(prefix=prefix, dir="/dev/shm"))
    return Path(tempfile.mkdtemp(prefix=prefix))


def end_by_signals() -> None:
    """Let SIGTERM and SIGHUP clean up too, as Ctrl-C does."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))


def agent_description(place: Place) -> dict[str, Any]:
    """How the agent describes itself; empty while there is none."""
    return files.read_mapping(place.agent_file)


def stop_agent(place: Place) -> None:
    """End the agent, and wait for its last export."""
    pid = place.agent_pid()
    if not pid:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _AGENT_ENDS_S
    while place.agent_is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)
