"""Which task of a process pool calls us, if any: a worker takes one after the other."""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import NamedTuple

from otel_ddp.identity import launchers

# The functions in which workers wait for tasks, and what they hold once they have one.
_LOOPS = {
    ("multiprocessing.pool", "worker"): ("job", "i"),
    ("concurrent.futures.process", "_process_worker"): ("call_item",),
}


class Task(NamedTuple):
    """One task, as far as it can be told from others."""

    number: tuple[object, ...]
    """What the pool calls it. A pool may hand out several calls of a function as one task."""
    calls: tuple[tuple[CodeType, int], ...]
    """Which calls lead from the pool to us, and where in each of them the next one stands."""

    def follows(self, before: Task, asks_for_the_same: bool) -> bool:
        """Whether *before* is over; else this is another call from the same task.

        Where a program comes by the same place again it is in a loop, or the next call of several
        that the pool has handed out as one task: that one asks for another run.
        """
        if self.number != before.number:
            return True
        return self.calls == before.calls and not asks_for_the_same


def in_worker() -> bool:
    """Whether this process is a worker of a pool, and we are called by that pool."""
    return _find()[0] is not None


def current_task() -> Task | None:
    """The task that calls us; None outside of pools and in the initializer of a worker."""
    loop, calls = _find()
    if loop is None:
        return None
    known = loop.f_locals
    held = [known.get(name) for name in _LOOPS[_name(loop)]]
    # Before Python 3.13 this is a copy that the frame keeps, with what the task was given.
    if type(known) is dict:
        known.clear()
    if None in held:
        return None
    numbers = (getattr(each, "work_id", each) for each in held)
    return Task(tuple(numbers), tuple(calls))


def _find() -> tuple[FrameType | None, list[tuple[CodeType, int]]]:
    calls: list[tuple[CodeType, int]] = []
    # Pools of threads work by the same functions, and a thread is no process of its own.
    if launchers.multiprocessing_parent() is None or _is_beside_the_main_thread():
        return None, calls
    frame: FrameType | None = sys._getframe()
    while frame is not None and _name(frame) not in _LOOPS:
        calls.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return frame, calls


def _is_beside_the_main_thread() -> bool:
    return threading.current_thread() is not threading.main_thread()


def _name(frame: FrameType) -> tuple[str, str]:
    return str(frame.f_globals.get("__name__")), frame.f_code.co_name
