"""Learns of the end of a thread: that of a training function which a container has called."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from otel_ddp.errors import containment

_of_thread = threading.local()


class _Told:
    """Python drops what belongs to a thread when the thread ends."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.pid = os.getpid()

    def __del__(self) -> None:
        # A forked child drops what belonged to the other threads, and so does Python at its end.
        # Those threads may be in the middle of a write, and hold its lock for ever.
        if self.pid == os.getpid() and not sys.is_finalizing():
            containment.attempt(self.act, None)


def tell(act: Callable[[], None]) -> None:
    """Call this when the present thread ends, unless it is the main one: then the process ends."""
    if threading.current_thread() is threading.main_thread():
        return
    if (told := getattr(_of_thread, "told", None)) is None:
        _of_thread.told = _Told(act)
    else:
        told.act = act
