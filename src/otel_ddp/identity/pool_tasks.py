"""Finds the task of a process pool that calls us: a worker does one task after the other."""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import NamedTuple

from otel_ddp.identity import launchers

# The functions in which workers wait for tasks, and their variables that hold a task.
_LOOPS = {
    ("multiprocessing.pool", "worker"): ("job", "i"),
    ("concurrent.futures.process", "_process_worker"): ("call_item",),
}


class Task(NamedTuple):
    """One task, as far as it can be distinguished from others."""

    number: tuple[object, ...]
    """The pool's number of it. A pool may give out several calls of a function as one task."""
    calls: tuple[tuple[CodeType, int], ...]
    """The calls that lead from the pool to us, and the position of the next call in each."""

    def follows(self, before: Task, asks_for_the_same: bool) -> bool:
        """Whether *before* is over; else this is another call of the same task.

        A program that comes to the same place again is in a loop, or it does the next of several
        calls that the pool gave out as one task. Only the latter asks for another run.
        """
        if self.number != before.number:
            return True
        return self.calls == before.calls and not asks_for_the_same


def in_worker() -> bool:
    """Whether this process is a pool's worker, and the pool calls us."""
    return _find()[0] is not None


def current_task() -> Task | None:
    """The task that calls us; None outside of pools and in a worker's initializer."""
    loop, calls = _find()
    if loop is None:
        return None
    known = loop.f_locals
    held = [known.get(name) for name in _LOOPS[_name(loop)]]
    # Before Python 3.13 this is a copy that the frame keeps, together with the task's arguments.
    if type(known) is dict:
        known.clear()
    if None in held:
        return None
    numbers = (getattr(each, "work_id", each) for each in held)
    return Task(tuple(numbers), tuple(calls))


def _find() -> tuple[FrameType | None, list[tuple[CodeType, int]]]:
    calls: list[tuple[CodeType, int]] = []
    # Pools of threads use the same functions, and a thread is no process of its own.
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
