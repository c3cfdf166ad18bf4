"""One thread with one event loop for all links of an agent: those that it leads and follows.

The agent's own loop never waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

from otel_ddp import errors
from otel_ddp.agent.kept_thread import KeptThread

Job = Callable[[], Awaitable[None]]
"""Runs until it is cancelled; one that ends or raises is started again."""

_T = TypeVar("_T")

_AGAIN_AFTER_S = 5.0


class LinkThread:
    """The agent's loop calls `thread.keep_running` every second, as of its other threads."""

    def __init__(self) -> None:
        self.thread = KeptThread("link", self._work)
        self._jobs: set[Job] = set()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: asyncio.Event | None = None
        self._ends = False

    def start(self) -> None:
        self.thread.keep_running()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End all jobs and the thread."""
        with self._lock:
            self._ends = True
        self._notify()
        self.thread.join(timeout_s)

    def add(self, job: Job) -> None:
        """Run it from now on."""
        with self._lock:
            self._jobs.add(job)
        self._notify()

    def discard(self, job: Job) -> None:
        """Cancel it, soon."""
        with self._lock:
            self._jobs.discard(job)
        self._notify()

    def call(self, function: Callable[[], None]) -> None:
        """Call it in the thread, soon; not at all where the thread does not run."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function)

    def _notify(self) -> None:
        changed = self._changed
        if changed is not None:
            self.call(changed.set)

    def _work(self) -> None:
        asyncio.run(self._run_jobs())

    async def _run_jobs(self) -> None:
        changed = asyncio.Event()
        with self._lock:
            self._changed, self._loop = changed, asyncio.get_running_loop()
        running: dict[Job, asyncio.Task[None]] = {}
        try:
            while True:
                changed.clear()
                with self._lock:
                    wanted = set() if self._ends else set(self._jobs)
                    ends = self._ends
                # They may hold the port of a new one.
                await _cancelled([running.pop(job) for job in running.keys() - wanted])
                for job in wanted - running.keys():
                    running[job] = asyncio.create_task(_kept(job))
                if ends:
                    return
                await changed.wait()
        finally:
            with self._lock:
                self._loop = self._changed = None
            await _cancelled(list(running.values()))


async def _kept(job: Job) -> None:
    while True:
        try:
            await job()
        except errors.ANY_ERROR:
            errors.record_failure("a link")
        await asyncio.sleep(_AGAIN_AFTER_S)


async def _cancelled(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def within(seconds: float, awaited: Awaitable[_T]) -> _T:
    """Its result, or asyncio.TimeoutError.

    asyncio.wait_for loses a cancellation that comes at the same moment as the result, before Python
    3.12: the job would go on for ever.
    """
    task = asyncio.ensure_future(awaited)
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
