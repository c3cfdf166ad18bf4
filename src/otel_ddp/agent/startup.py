"""The agent as a process: its log, directory and lock, its limits, and what wakes it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import time
from pathlib import Path

from otel_ddp import files, settings
from otel_ddp.errors import ConfigError
from otel_ddp.history.terminal import printable
from otel_ddp.journal.place import LOG_FORM, Place, find

log = logging.getLogger("otel_ddp.agent")

_LOCK_PATIENCE_S = 3.0
# Ends of processes wake the agent at once. Each time it wakes, what it touches has left the caches:
# half as often takes a fifth less time where there is little to read.
TICK_S = 0.5
# Of the objects that may hold each other, how many more there are at each search.
_MORE_OBJECTS = 10_000


class _Printable(logging.Formatter):
    """Texts of journals, files and collectors stand in messages: they control no terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message, most=len(record.message))
        return super().formatMessage(record)


def log_to_stderr() -> None:
    """Begins the agent's log."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable(f"%(asctime)s{LOG_FORM}%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def find_place(conf: settings.Settings, foreground: bool) -> Place:
    """The directory whose journals this agent reads."""
    if not foreground:
        # The training process that started this agent has made it; without it there is no work.
        os.stat(conf.directory)
        return Place(files.private_directory(Path(conf.directory)))
    places, remark = find(conf.directory, offline=conf.offline)
    if not places:
        raise ConfigError(remark)
    if remark:
        log.warning("%s", remark)
    return places[0]


def lock_place(place: Place) -> int | None:
    """Become the agent of this place; None if it has one. Closing the descriptor unlocks it."""
    fd = files.open_own(place.agent_lock, os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            files.lock(fd)
            return fd
        # The agent before this one may be about to end.
        time.sleep(0.05)
    os.close(fd)
    return None


def leave_training_alone() -> None:
    """Give up the pins and the privileges of the training process that started this agent."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with contextlib.suppress(OSError):
        os.nice(5)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def search_garbage_seldom() -> None:
    """Let Python look for objects that hold each other in larger portions.

    What the agent reads comes and goes by the thousand, and holds nothing in circles. Python looks
    at every 700 of them, which took a quarter of the agent's time where ranks log many values.
    """
    gc.freeze()
    _, middle, old = gc.get_threshold()
    gc.set_threshold(_MORE_OBJECTS, middle, old)


def open_doorbell(path: Path) -> int:
    """The fifo that wakes the agent; -1 if it cannot be opened: then only the clock wakes it."""
    try:
        if not path.is_fifo() or path.is_symlink():
            files.remove(path)
            files.make_fifo(path)
        # Read and write: a fifo whose last writer has left would be readable for ever.
        return files.open_own(path, os.O_RDWR)
    except OSError as error:
        log.warning("no doorbell (%s): ends of processes are seen a moment later", error)
        return -1


def wait(doorbell: int, handles: list[int], tick_s: float = TICK_S) -> None:
    """Sleep for a tick, or until the doorbell or one of the handles wakes us.

    *doorbell*: -1 if there is none. *handles*: of processes, readable once they are dead.
    """
    # Not select(), which takes no number above 1023: each process costs two.
    poll = select.poll()
    try:
        for each in (doorbell, *handles) if doorbell >= 0 else handles:
            poll.register(each, select.POLLIN)
        woken = dict(poll.poll(tick_s * 1000))
        waited = not any(events & select.POLLNVAL for events in woken.values())
    except (OSError, ValueError):
        woken, waited = {}, False
    if not waited:
        # A descriptor that cannot be waited for would return at once, for ever: use the clock.
        time.sleep(tick_s)
    if doorbell in woken:
        with contextlib.suppress(OSError):
            os.read(doorbell, 4096)
