"""The run of this process: opened once, spoken to by the module's functions, ended in time."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any, TypeVar

from otel_ddp import containment, pools
from otel_ddp.run import Run, own_task, why
from otel_ddp.strategies import Strategy

T = TypeVar("T")

_current: Run | None = None
# A run that came into this process by pickle or by fork and was not used yet.
_unused: Run | None = None
# Of a process whose own run is another: a worker of a pool that does a task of a sweep, say.
_beside: list[Run] = []
_opening = threading.RLock()
_watched: set[int] = set()


def init(
    strategy: Strategy | None = None,
    *,
    group: str | None = None,
    run: str | None = None,
    job_type: str | None = None,
    project: str | None = None,
    name: str | None = None,
    description: str | None = None,
    tags: str | Collection[str] | None = None,
    node: str | None = None,
    global_rank: int | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
    config: Any = None,
    parallel: Mapping[str, Any] | None = None,
) -> Run:
    """Open the run of this process, or return the one that is open.

    Every argument has a variable (OTEL_DDP_GROUP, ...) and a default from the launcher.
    """
    with _opening:
        arguments = {
            "strategy": strategy,
            "group": group,
            "run": run,
            "job_type": job_type,
            "project": project,
            "name": name,
            "description": description,
            "tags": tags,
            "node": node,
            "global_rank": global_rank,
            "local_rank": local_rank,
            "world_size": world_size,
            "config": config,
            "parallel": parallel,
        }
        task = own_task()
        if _current is not None and not _current.is_over(task, arguments):
            _current.opened_again(arguments)
            return _current
        if _current is not None:
            _current.close("finished", "")
        opened = _begun(arguments, task)
        _open(opened)
        return opened


def _begun(arguments: dict[str, Any], task: pools.Task | None) -> Run:
    """The run that `init` opens: a new one, or one that came into this process, if it is meant."""
    if _unused is None or task is not None or arguments["run"] not in (None, _unused.run):
        return Run(arguments, task=task)
    return _unused.told(arguments)


def current() -> Run | None:
    """The run of this process, if one is open."""
    return _current


def _at_hand() -> Run | None:
    """The run of this process, or the one that it would join."""
    return _unused if _current is None else _current


def log(
    metrics: Mapping[str, Any],
    *,
    step: int | None = None,
    epoch: float | None = None,
    split: str | None = None,
) -> None:
    """Record numbers in the current run; nothing happens where there is none."""
    if (run := _at_hand()) is not None:
        run.log(metrics, step=step, epoch=epoch, split=split)


def phase(name: str, *, expect_s: float | None = None) -> contextlib.AbstractContextManager[None]:
    """Say what this process does, in the current run if there is one."""
    run = _at_hand()
    return contextlib.nullcontext() if run is None else run.phase(name, expect_s=expect_s)


def span(name: str, /, **attributes: Any) -> contextlib.AbstractContextManager[None]:
    """Record how long something takes, in the current run if there is one."""
    run = _at_hand()
    return contextlib.nullcontext() if run is None else run.span(name, **attributes)


def event(name: str, /, **attributes: Any) -> None:
    """Record that something happened, in the current run if there is one."""
    if (run := _at_hand()) is not None:
        run.event(name, **attributes)


def config(mapping: T) -> T:
    """Record the configuration in the current run if there is one; returned unchanged."""
    run = _at_hand()
    return mapping if run is None else run.config(mapping)


def finish(state: str = "finished", *, reason: str = "") -> None:
    """End the current run if there is one."""
    if _current is not None:
        _current.finish(state, reason=reason)


# -- the life of the run


def attach(arguments: dict[str, Any]) -> Run:
    """What an unpickled run becomes. Lazily: a data loader's worker has one too, and is silent."""
    global _unused
    with _opening:
        if _current is not None:
            return _current
        # However often it comes, and whoever uses it first: one process, one run.
        if _unused is None:
            _unused = Run(arguments, joins=True)
        return _unused


def join(run: Run) -> None:
    """Open a run that came by pickle or by fork and is used for the first time."""
    global _unused
    with _opening:
        # Another thread may have come first.
        if run.opened:
            return
        if run is _unused:
            _unused = None
        if run.logs_for_another_rank:
            run.open()
        elif _current is None:
            _open(run)
        else:
            run.open()
            _beside.append(run)


def _open(run: Run) -> None:
    try:
        run.open()
        adopt(run)
    except BaseException as raised:
        # Ctrl-C, say: what has begun by then has an end as well.
        run.close("failed", why(raised))
        raise


def adopt(run: Run) -> None:
    """Make this the run of the process, and see to its end."""
    global _current, _unused
    _current = run
    if _unused is run:
        _unused = None
    pid = os.getpid()
    if pid in _watched:
        return
    _watched.add(pid)
    bootstrap = _bootstrap()
    atexit.register(_at_exit, pid, bootstrap)
    multiprocessing = sys.modules.get("multiprocessing")
    if multiprocessing is not None and multiprocessing.parent_process() is not None:
        # A forked child leaves without atexit; and only here is its exception still at hand.
        from multiprocessing.util import Finalize

        Finalize(None, _at_exit, args=(pid, bootstrap), exitpriority=100)


def release(run: Run) -> None:
    """This run is no longer the one of the process."""
    global _current
    if _current is run:
        _current = None
    elif run in _beside:
        _beside.remove(run)


def _bootstrap() -> FrameType | None:
    """The frame of multiprocessing that has begun this child and knows how it ends.

    From Python 3.13 on it has handled the exception already when finalizers are called.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (
        frame.f_code.co_name == "_bootstrap"
        and frame.f_globals.get("__name__") == "multiprocessing.process"
    ):
        frame = frame.f_back
    return frame


@containment.contained()
def _at_exit(pid: int, bootstrap: FrameType | None) -> None:
    if os.getpid() != pid:
        return
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if hasattr(sys, "ps1"):
        error = None  # what failed at a prompt hours ago did not end this process
    if error is None:
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            # torch's spawn reports a failure by leaving with 1 from its exception handler.
            error = (error.__context__ or error) if error.code else None
    code = None if bootstrap is None else bootstrap.f_locals.get("exitcode")
    reason = why(error) if error is not None else f"exit code {code}" if code else ""
    for run in (_current, *_beside):
        if run is not None:
            run.close("failed" if reason else "finished", reason)


def _after_fork() -> None:
    global _current, _unused, _opening
    for run in _beside:
        run.brought_by_fork()
    _beside.clear()
    # A thread of the parent may have held it, and that thread is not here.
    _opening = threading.RLock()
    inherited = _unused if _current is None else _current
    _current = None
    _unused = inherited if inherited is not None and inherited.brought_by_fork() else None


# Where there is none, nothing is recorded either, and this module is imported all the same.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
