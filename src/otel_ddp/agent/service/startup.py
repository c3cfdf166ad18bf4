"""Starts an agent: finds its directory, locks it, closes the descriptors that it inherited."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import time
from pathlib import Path
from typing import Any

from otel_ddp import files, settings
from otel_ddp.errors import ConfigError
from otel_ddp.history.quantities import printable
from otel_ddp.journal import locks
from otel_ddp.journal.place import LOG_FORM, Place, find

log = logging.getLogger("otel_ddp.agent")

_LOCK_PATIENCE_S = 3.0


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
    fd = files.open_private(place.agent_lock, os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while not _locked(fd):
        if time.monotonic() > deadline:
            os.close(fd)
            return None
        # The agent before this one may be about to end.
        time.sleep(0.05)
    return fd


def _locked(fd: int) -> bool:
    try:
        locks.acquire(fd)
    except OSError:
        return False
    return True


def verdicts_before(place: Place) -> list[dict[str, Any]]:
    """The open verdicts of an agent that was killed: one that leaves in order takes its file."""
    verdicts = files.read_mapping(place.agent_file).get("verdicts")
    return [each for each in verdicts or () if isinstance(each, dict)]


def raise_file_limit() -> None:
    """Allow as many open files as the system lets us: a process costs two, a node may have many."""
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def leave_training_alone() -> None:
    """Give up the pins and the privileges of the training process that started this agent."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with contextlib.suppress(OSError):
        os.nice(5)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
