"""The current run of this process, and the end of a run, which happens exactly once."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from otel_ddp import errors
from otel_ddp.recording import values

# A `Run`, but `Any` here, as its module imports this one.
_current: Any = None
# A run that came into this process by pickle or fork and is not used yet.
_inherited: Any = None
# Open runs of this process besides the current one, for example in a sweep with a pool's worker.
_beside: list[Any] = []
_opening = threading.RLock()
_watched: set[int] = set()


def opening() -> threading.RLock:
    """The lock held while a run is opened. Get it anew at each use: a forked child has another."""
    return _opening


def current() -> Any:
    """The run of this process, if one is open."""
    return _current


def inherited() -> Any:
    """A run that came into this process by pickle or fork and is not used yet."""
    return _inherited


def had_one() -> bool:
    """Whether this process has ever opened a run."""
    return os.getpid() in _watched


def attach(unpickled: Any) -> Any:
    """Replace an unpickled run by the run of this process; if it has none, use the unpickled run.

    The unpickled run opens at its first use.
    """
    global _inherited
    with _opening:
        if _current is not None:
            return _current
        # If a run is unpickled several times in one process, use the first object.
        if _inherited is None:
            _inherited = unpickled
        return _inherited


def join(run: Any) -> None:
    """Open a run that came by pickle or fork, at its first use."""
    global _inherited
    with _opening:
        # Another thread may have opened it meanwhile.
        if run.opened:
            return
        if run is _inherited:
            _inherited = None
        if _current is None:
            start(run)
        else:
            run.open()
            _beside.append(run)


def start(run: Any) -> None:
    """Open this run and make it the current run of this process."""
    try:
        run.open()
        adopt(run)
    except BaseException as raised:
        # End a run that has begun to open, also at Ctrl-C (hence BaseException).
        run.ended_by(raised)
        run.close("failed", values.error_line(raised))
        raise


def adopt(run: Any) -> None:
    """Make this the current run of the process, and end it when the process ends."""
    global _current, _inherited
    _current = run
    if _inherited is run:
        _inherited = None
    pid = os.getpid()
    if pid in _watched:
        return
    _watched.add(pid)
    bootstrap = _bootstrap()
    atexit.register(_at_exit, pid, bootstrap)
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        # Also register with multiprocessing: its forked children skip atexit, and when its
        # finalizers run, the exception that ends the child is still known.
        from multiprocessing.util import Finalize

        Finalize(None, _at_exit, args=(pid, bootstrap), exitpriority=100)


def release(run: Any) -> None:
    """Forget a run that has ended."""
    global _current
    if _current is run:
        _current = None
    elif run in _beside:
        _beside.remove(run)


def _bootstrap() -> FrameType | None:
    """The frame of multiprocessing that runs this child; None outside of such a child.

    Its local variable `exitcode` tells how the child ends. From Python 3.13 on, finalizers need it,
    as the child has handled the exception before they run.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (
        frame.f_code.co_name == "_bootstrap"
        and frame.f_globals.get("__name__") == "multiprocessing.process"
    ):
        frame = frame.f_back
    return frame


@errors.contained()
def _at_exit(pid: int, bootstrap: FrameType | None) -> None:
    if os.getpid() != pid:
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if hasattr(sys, "ps1"):
        error = None  # an earlier error at the prompt did not end this process
    if error is None:
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            # torch's spawn calls `sys.exit(1)` in its exception handler: find the exception itself.
            error = (error.__context__ or error) if error.code else None
    code = None if bootstrap is None else bootstrap.f_locals.get("exitcode")
    reason = values.error_line(error) if error is not None else f"exit code {code}" if code else ""
    for run in (_current, *_beside):
        if run is not None:
            if error is not None:
                run.ended_by(error)
            outcome = run.tracker_outcome or ("finished", "")
            state, why = ("failed", reason) if reason else outcome
            run.close(state, why)
    if isinstance(error, KeyboardInterrupt):
        _be_ended_by_interrupt()


def _be_ended_by_interrupt() -> None:
    """Let Python end by SIGINT after an uncaught Ctrl-C, so that the calling shell stops, too.

    Python does so if its last `exec` raised KeyboardInterrupt, so repeat that: ending a run may
    have called `exec` since, as when it creates a named tuple.
    """
    with contextlib.suppress(KeyboardInterrupt):
        exec("raise KeyboardInterrupt")


def _after_fork() -> None:
    global _current, _inherited, _opening
    for run in _beside:
        run.enter_fork()
    _beside.clear()
    # A thread of the parent may have held this lock, and no such thread exists here to release it.
    _opening = threading.RLock()
    candidate = _inherited if _current is None else _current
    _current = None
    _inherited = candidate if candidate is not None and candidate.enter_fork() else None


# Systems without fork can import this module, but record nothing.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# -- the end of a run: a list of actions, all of which run even if some fail

Action = Callable[[], Any]

# How long a thread waits for another thread that is ending the same run.
_WAIT_S = 1.0


class Ending:
    """Ends one run, once. Threads and signal handlers may request the end at the same time."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._actions: list[Action] = []

    def run(self, is_over: Callable[[], bool], actions: Callable[[], list[Action]]) -> None:
        """Run the actions, unless the run has ended."""
        # Use a timeout: the thread that holds the lock may wait for a lock that this thread holds.
        if not self._lock.acquire(timeout=_WAIT_S):
            return
        try:
            if is_over():
                return
            # If actions are left, a signal handler has interrupted another call of this method and
            # calls it again: run the remaining actions.
            if not self._actions:
                self._actions += actions()
            _do_all(self._actions)
        finally:
            self._lock.release()


def _do_all(actions: list[Action]) -> None:
    """Run all actions, and remove each one that is done.

    If a signal handler raises during an action, this action is repeated, and the exception is
    raised again after the last one. If a handler calls this itself, it runs the remaining actions.
    """
    try:
        while actions:
            action = actions[0]
            action()
            if actions[:1] == [action]:
                del actions[0]
    except BaseException:
        while actions:
            action = actions[0]
            errors.attempt(action, None)
            if actions[:1] == [action]:
                del actions[0]
        raise
