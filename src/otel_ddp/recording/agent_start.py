"""Starts the node's agent from a training process, and waits for it at the end of a run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from otel_ddp import errors, files
from otel_ddp.journal.place import LOG_FORM, Place
from otel_ddp.journal.writer import JournalWriter

# How long an agent may take from its start until it locks `agent.lock`. No process starts another
# agent during this time.
START_GRACE_S = 5.0
# How often a rank checks that the agent is alive.
CHECK_EVERY_NS = 4_000_000_000
# How long a run waits at its end, at most, until the agent has read the last records.
WAIT_FOR_AGENT_S = 0.25

# Matches the names of executables that are Python (CPython, PyPy, GraalPy, Pyston, any version). No
# other executable can run the agent.
_PYTHON = re.compile("python|pypy|graalpy|pyston", re.IGNORECASE)
# This environment variable marks the agent and the processes that it starts, so that these start no
# other agent. It is internal, not a setting for users.
_MARK = "_OTEL_DDP_IS_AGENT"
_MARKED_HOLD_S = 60.0
# The agent's log lies in shared memory. If it is larger than this, we truncate it before the next
# agent starts.
_LOG_BYTES = 256 * 1024
# The journal directories for which this process has started an agent.
_started: set[Path] = set()


@errors.contained(default=False)
def ensure_agent(place: Place) -> bool:
    """Start the node's agent unless one is alive or starting; True if this call started one."""
    if _MARK in os.environ:
        # We started `sys.executable` as Python, but it is the training program itself, and now runs
        # a second time. Postpone further starts on this node, as each would run another copy.
        place.delay_start(_MARKED_HOLD_S)
        _warn_no_agent(f"{sys.executable} runs this program, whatever its arguments")
        return False
    if place.agent_is_alive():
        return False
    try:
        return _start_once(place)
    except OSError as error:
        errors.reraise_foreign()
        # The journal directory was removed or replaced during the run, or no process can be
        # created.
        what = f"{error.strerror}: {error.filename}" if error.filename else error.strerror
        errors.warn_once("agent", "the node agent cannot be started (%s).", what)
        return False


def _start_once(place: Place) -> bool:
    fd = files.open_own(place.start_lock, os.O_RDWR | os.O_CREAT)
    try:
        try:
            files.lock(fd)
        except OSError:
            errors.reraise_foreign()
            return False  # another rank is starting the agent
        if time.monotonic() < place.start_not_before() or place.agent_is_alive():
            return False
        place.delay_start(START_GRACE_S)
        line = place.last_line()
        # Each line that an agent logs contains LOG_FORM. Any other last line comes from Python's
        # traceback, so the agent crashed.
        if place.directory in _started and line and LOG_FORM not in line:
            errors.warn_once(
                "agent",
                "the node agent was ended by an error and is started again (%s; %s): logged values "
                "wait in the journal. The agent inherits the limits of this process (ulimit).",
                line,
                place.agent_log,
            )
        _started.add(place.directory)
        return _start(place)
    finally:
        os.close(fd)


def _start(place: Place) -> bool:
    if why := _no_python():
        _warn_no_agent(why)
        return False
    root = str(Path(__file__).parents[2])
    # Append to sys.path, not insert: packages in our parent directory must not shadow the modules
    # that the agent imports.
    code = (
        f"import sys; sys.path.append({root!r}); "
        f"from otel_ddp.agent.service import main; main({str(place.directory)!r})"
    )
    command = shlex.join([sys.executable, *_flags(), "-c", code])
    # The shell exits at once, so init adopts and reaps the agent, which never becomes a zombie.
    # `cd /` keeps the agent from importing a local json.py, and from blocking an unmount.
    script = f"cd / && {command} &"
    # Open the log here: if the shell did and failed, its error would appear on the training's
    # terminal.
    log = files.open_own(place.agent_log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        # The training process truncates the log, not the agent: an agent that crashes at startup,
        # again and again, would never come to do so.
        if os.fstat(log).st_size > _LOG_BYTES:
            os.ftruncate(log, 0)
        # close_fds is essential: torch's FileStore holds a flock on a descriptor that exec would
        # pass on. An agent that inherits it would block the other ranks forever.
        subprocess.run(
            ["/bin/sh", "-c", script],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=True,
            check=False,
        )
    finally:
        os.close(log)
    return True


def _no_python() -> str:
    """Why this program's executable cannot run an agent; empty if it can."""
    path = sys.executable or "sys.executable"
    # Check the name of the executable and of the file that it links to, as a symlink may have any
    # name. `sys.frozen` is set by PyInstaller and cx_Freeze: then the executable is the training
    # program itself, which would run a second time, whatever its arguments.
    names = [os.path.basename(each) for each in (path, os.path.realpath(path))]
    is_python = any(map(_PYTHON.search, names)) and not getattr(sys, "frozen", False)
    return "" if is_python else f"{path} is no Python"


def _warn_no_agent(why: str) -> None:
    errors.warn_once(
        "agent",
        "%s, so no node agent can be started from here: run `otel-ddp agent` on this node and set "
        "OTEL_DDP_AGENT=external.",
        why,
    )


def _flags() -> list[str]:
    """This interpreter's isolation flags (-I, -E, -S), which the agent inherits."""
    flags = sys.flags
    asked = {"-I": flags.isolated, "-E": flags.ignore_environment, "-S": flags.no_site}
    return [flag for flag, given in asked.items() if given]


def _environment() -> dict[str, str]:
    # Profilers and launchers set these variables for the training process, not for the agent.
    left_out = ("LD_PRELOAD", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONWARNINGS", "PYTHONDEVMODE")
    kept = {key: value for key, value in os.environ.items() if key not in left_out}
    # The agent's threads take turns, so one malloc arena is enough; one per thread would cost 5 MB.
    return {"MALLOC_ARENA_MAX": "1", **kept, _MARK: "1"}


def wait_for_agent(place: Place, journal: JournalWriter) -> bool:
    """Wait up to WAIT_FOR_AGENT_S until the agent has read the last record; True if it has."""
    place.wake_agent()
    deadline = time.monotonic() + WAIT_FOR_AGENT_S
    while journal.agent_position() < journal.position:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True
