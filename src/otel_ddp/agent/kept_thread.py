"""A thread that is restarted if it could not start, or if an error ended it.

A start fails while the node has as many threads as its limits allow.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from otel_ddp import errors


class KeptThread:
    """A daemon thread. The agent's loop calls `keep_running` each second, which restarts it."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        """*work*: what the thread runs; it must return when the thread should end."""
        self.name = name
        self._work = work
        self._thread: threading.Thread | None = None
        self._wanted = False
        self._why = "an error ended it"

    def keep_running(self) -> None:
        """Start the thread unless it runs; if that fails, `problem` says why."""
        if self.is_alive():
            return
        # Make it a daemon thread, so that the agent can end even if this thread hangs.
        thread = threading.Thread(target=self._run, name=f"otel-ddp-{self.name}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._why = f"{error} (ulimit -u, or the pids.max of its cgroup)"
        else:
            self._thread, self._why = thread, "an error ended it"
        # Set this only after the first attempt to start the thread: before, it is no problem that
        # the thread does not run.
        self._wanted = True

    def _run(self) -> None:
        try:
            self._work()
        except errors.ANY_ERROR:
            errors.record_failure(f"the thread {self.name}")

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def problem(self) -> str:
        """Why the thread does not run although it should; else empty."""
        if not self._wanted or self.is_alive():
            return ""
        return f"the thread {self.name} does not run: {self._why}"

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread's end, and do not restart it; False if it still runs."""
        self._wanted = False
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()
