"""What wakes the agent: a signal from a training process, the death of one, or the clock."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import stat
import time
from pathlib import Path

from otel_ddp import files

log = logging.getLogger("otel_ddp.agent")

TICK_S = 0.25


def open_doorbell(path: Path) -> int:
    """The fifo that wakes the agent; -1 if it cannot be opened: then only the clock wakes it."""
    try:
        try:
            if not stat.S_ISFIFO(os.lstat(path).st_mode):
                path.unlink()
                os.mkfifo(path, 0o600)
        except FileNotFoundError:
            os.mkfifo(path, 0o600)
        # Read and write: a fifo whose last writer has left would be readable for ever.
        return files.open_private(path, os.O_RDWR)
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
