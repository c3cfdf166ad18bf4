"""One thread with one event loop for all links of an agent: those that it leads and follows.

The agent's own loop never waits for it.
"""

from __future__ import annotations

import asyncio
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
        self._running: dict[Job, asyncio.Task[None]] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ends = False
        self._ended: asyncio.Event | None = None

    def start(self) -> None:
        self.thread.keep_running()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End all jobs and the thread."""
        self._jobs.clear()
        self._ends = True
        self.call(self._update)
        self.thread.join(timeout_s)

    def add(self, job: Job) -> None:
        """Run it from now on."""
        self._jobs.add(job)
        self.call(self._update)

    def discard(self, job: Job) -> None:
        """Cancel it, soon."""
        self._jobs.discard(job)
        self.call(self._update)

    def call(self, function: Callable[[], None]) -> None:
        """Call it in the thread, soon; not at all where the thread does not run."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(function)

    def _work(self) -> None:
        asyncio.run(self._run_jobs())

    async def _run_jobs(self) -> None:
        with self._lock:
            self._loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        try:
            self._update()
            await self._ended.wait()
        finally:
            with self._lock:
                self._loop = None
            # asyncio.run cancels those that are left.
            self._running.clear()

    def _update(self) -> None:
        """Cancel what was discarded, which may hold the port of a new job, and begin that."""
        for job in self._running.keys() - self._jobs:
            self._running.pop(job).cancel()
        for job in {*self._jobs} - self._running.keys():
            self._running[job] = asyncio.create_task(_kept(job))
        if self._ends and self._ended is not None:
            self._ended.set()


async def _kept(job: Job) -> None:
    while True:
        try:
            await job()
        except errors.ANY_ERROR:
            errors.record_failure("a link")
        await asyncio.sleep(_AGAIN_AFTER_S)


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
