"""Says of a worker that went without a word whether its parent has ended it, after its work."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import containment
from otel_ddp.agent.reading import workers
from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.verdicts.exit_causes import ExitCauses, exit_status
from otel_ddp.catalog import STATES

# The kernel tells how a worker ended once its parent has asked, and by then the parent of ranks has
# failed as well, if it does.
_PATIENCE_S = 2.0
# What ends a whole group of processes reaches the parent a moment after its workers.
_PARENT_FOLLOWS_S = 0.5
# A parent that ends the other children because one has failed does so within this.
_FOLLOWS_S = 40.0


class _Ended(NamedTuple):
    """A child that has ended."""

    parent: int
    at: float
    state: int
    process: tuple[int, int]
    """Its process id and start."""


class Parents:
    """One a node; called from the agent's loop alone."""

    def __init__(self, causes: ExitCauses, clock: Callable[[], float] = time.monotonic) -> None:
        self._causes = causes
        self._clock = clock
        # Of a parent that was gone already: -1.
        self._handles: dict[int, int] = {}
        # The parents of those that were alive at the last look.
        self._living: list[int] = []
        # By journal: when the end of this worker was seen.
        self._gone: dict[Path, float] = {}
        self._ended: dict[Path, _Ended] = {}

    @containment.contained()
    def watch(self, journals: Collection[JournalFeed]) -> None:
        """Hold on to workers and to their parents while they live."""
        now = self._clock()
        wanted: set[int] = set()
        self._living = []
        for journal in journals:
            reader = journal.reader
            parent = workers.parent(reader)
            if parent is None:
                continue
            if journal.ended_at is None:
                # It is a stranger's number where the worker is in another PID namespace.
                wanted |= {parent} if journal.pid == reader.pid else set()
                # At once: it may end before it knows its rank, and is known as a rank.
                if not journal.gone_ns:
                    self._living.append(parent)
                    self._causes.watch(journal.pid, reader.start_ticks)
            elif reader.path not in self._ended:
                process = journal.pid, reader.start_ticks
                self._ended[reader.path] = _Ended(parent, now, journal.state, process)
        here = {journal.reader.path for journal in journals}
        self._gone = {path: at for path, at in self._gone.items() if path in here}
        self._ended = {
            path: each
            for path, each in self._ended.items()
            if path in here or now - each.at < _FOLLOWS_S
        }
        self._hold(wanted)

    def _hold(self, wanted: set[int]) -> None:
        for parent in self._handles.keys() - wanted:
            handle = self._handles.pop(parent)
            if handle >= 0:
                os.close(handle)
        for parent in wanted - self._handles.keys():
            if (opened := _open_handle(parent)) is not None:
                self._handles[parent] = opened

    @containment.contained(default=False)
    def have_ended(self, journal: JournalFeed) -> bool | None:
        """Whether its parent has ended this worker, which is gone; None: it is too early to say."""
        reader = journal.reader
        if workers.is_proxy(reader) or not workers.is_idle(reader):
            return workers.was_ended(reader)
        waited_s = self._clock() - self._gone.setdefault(reader.path, self._clock())
        cause = self._causes.why(journal.pid, reader.start_ticks)
        asked = cause.get("signal") == "SIGTERM"
        settled = not asked and cause.keys() & {"signal", "exit_code", "out_of_memory"}
        patience_s = _PARENT_FOLLOWS_S if asked and workers.in_pool(reader) else _PATIENCE_S
        if not settled and waited_s < patience_s:
            return None
        return workers.was_ended(reader, self._end(journal, cause))

    def _end(self, journal: JournalFeed, cause: Mapping[str, Any]) -> workers.End:
        parent = workers.parent(journal.reader) or 0
        now = self._clock()
        handle = self._handles.get(parent)
        status = None if handle is None else exit_status(handle)
        code = 0 if status is None or not os.WIFEXITED(status) else os.WEXITSTATUS(status)
        failed = any(
            each.parent == parent and now - each.at < _FOLLOWS_S and self._failed(each)
            for path, each in self._ended.items()
            if path != journal.reader.path
        )
        return workers.End(
            cause=cause,
            parent_lives=None if handle is None else handle >= 0 and not _is_readable(handle),
            parent_was_killed=status is not None and os.WIFSIGNALED(status),
            others_live=parent in self._living,
            others_failed=failed or code > 0,
        )

    def _failed(self, ended: _Ended) -> bool:
        if ended.state == STATES["killed"]:
            return self._causes.why(*ended.process).get("signal") != "SIGTERM"
        return ended.state == STATES["failed"]


def _open_handle(pid: int) -> int | None:
    """Becomes readable when the process dies; -1: there is no such process; None: not known."""
    opened: Callable[[int], int] | None = getattr(os, "pidfd_open", None)
    try:
        return None if opened is None else opened(pid)
    except ProcessLookupError:
        return -1
    except OSError:
        return None


def _is_readable(handle: int) -> bool:
    asked = select.poll()
    asked.register(handle, select.POLLIN)
    return bool(asked.poll(0))
