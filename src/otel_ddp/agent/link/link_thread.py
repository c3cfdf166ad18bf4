"""One thread with one event loop for all links of an agent: those that it leads and follows.

The agent's own loop never waits for it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from otel_ddp import errors
from otel_ddp.agent.kept_thread import KeptThread

Job = Callable[[], Coroutine[Any, Any, None]]
"""Runs until it is cancelled; one that ends or raises is started again."""

_T = TypeVar("_T")

_AGAIN_AFTER_S = 2.0


class LinkThread:
    """The agent's loop calls `thread.keep_running` every second, as of its other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self.thread = KeptThread("link", self._loop.run_forever)
        self._running: dict[Job, Future[None]] = {}

    def start(self) -> None:
        self.thread.keep_running()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End all jobs and the thread."""
        asyncio.run_coroutine_threadsafe(_end_all(), self._loop)
        if self.thread.join(timeout_s):
            self._loop.close()

    def add(self, job: Job) -> None:
        """Run it from now on."""
        self._running[job] = asyncio.run_coroutine_threadsafe(_kept(job), self._loop)

    def discard(self, job: Job) -> None:
        """Cancel it, soon."""
        if (running := self._running.pop(job, None)) is not None:
            running.cancel()

    def call(self, function: Callable[[], None]) -> None:
        """Call it in the thread, soon."""
        self._loop.call_soon_threadsafe(function)


async def _kept(job: Job) -> None:
    while True:
        try:
            await job()
        except errors.ANY_ERROR:
            errors.record_failure("a link")
        # Not all nodes of a run at the same moment.
        await asyncio.sleep(_AGAIN_AFTER_S * random.uniform(0.5, 1.5))


async def _end_all() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for each in others:
        each.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    asyncio.get_running_loop().stop()


async def within(seconds: float, awaited: Awaitable[_T]) -> _T:
    """Its result, or asyncio.TimeoutError.

    asyncio.wait_for loses a cancellation that comes at the same moment as the result, before Python
    3.12: the job would go on for ever.
    """
    task = asyncio.ensure_future(awaited)
    # Of one that fails as it is cancelled asyncio would log the error.
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    try:
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
