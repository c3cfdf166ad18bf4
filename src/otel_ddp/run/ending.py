"""Ends a run once, whatever interrupts it: each act of the end is done, in order."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from otel_ddp import errors

Act = Callable[[], Any]

# How long one thread waits for another that ends the same run.
_WAIT_S = 1.0


class Ending:
    """The end of one run. Threads and signal handlers may all ask for it at once."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._acts: list[Act] = []

    def run(self, is_over: Callable[[], bool], acts: Callable[[], list[Act]]) -> None:
        """Does the acts unless the run is over."""
        # A limit, because the other thread may need a lock that this thread has.
        if not self._lock.acquire(timeout=_WAIT_S):
            return
        try:
            if is_over():
                return
            # A handler that interrupts the end does the acts that are left.
            if not self._acts:
                self._acts += acts()
            _do_all(self._acts)
        finally:
            self._lock.release()


def _do_all(acts: list[Act]) -> None:
    """Does all acts and removes each one that is done.

    What a signal handler raises in the middle of an act is raised after the last one; the
    interrupted act is done again. The handler may itself do all acts that are left.
    """
    try:
        while acts:
            act = acts[0]
            act()
            if acts[:1] == [act]:
                del acts[0]
    except BaseException:
        while acts:
            act = acts[0]
            errors.attempt(act, None)
            if acts[:1] == [act]:
                del acts[0]
        raise
