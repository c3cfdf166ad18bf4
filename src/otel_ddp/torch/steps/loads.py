"""The waits for batches of the thread that trains."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable

from otel_ddp.torch.inspection import CALL_MODULE, times_called
from otel_ddp.torch.steps.open_calls import is_another_thread
from otel_ddp.torch.steps.open_step import OpenStep
from otel_ddp.torch.steps.sampled import OFTEN
from otel_ddp.torch.steps.usual import UsualSteps

_get_ident = threading.get_ident


class Loads:
    """A batch begins a step, or is the next one of the step that is open."""

    HOOKS = ("began", "ended")
    began: Callable[[], None]
    ended: Callable[[], None]

    def __init__(self, step: OpenStep, usual: UsualSteps) -> None:
        self._progress, self._calls, self._step = step.progress, step.calls, step
        self._usual = usual
        # The line of ours mostly stands in the thread that trains.
        self._made_in = _get_ident()
        self.thread = 0
        """The one that asked for the last batch."""

    def _began(self) -> None:
        """A loader is asked for the next batch."""
        thread = _get_ident()
        if self._usual.load_began(thread):
            self.thread = thread
            return
        step, calls = self._step, self._calls
        if not step.end.has_model:
            step.search.batch_wanted()
            return
        trains = self._progress.thread.ident
        if trains != thread and is_another_thread(trains or self._made_in, thread):
            return  # a thread fetches ahead: training does not wait for that
        self._usual.leave()
        if thread != calls.forward_thread and calls.another_thread_works(thread):
            return
        if calls.in_backward:
            calls.close_what_raised()
        in_forward = calls.forwards and not calls.in_backward
        if in_forward and not times_called(sys._getframe(), CALL_MODULE):
            calls.close_forward()
        if not calls.forwards:
            # In a forward, it is a model that fetches its batches by itself.
            if calls.in_backward:
                return
            end = step.end
            if not self._progress.steps.in_step or end.backwards:
                step.begin()
        self.thread = thread
        step.seen.loads += 1
        self._progress.phases.enter(self._calls.load)

    def _ended(self) -> None:
        """The batch is there."""
        if _get_ident() == self.thread and not self._usual.load_ended(self.thread):
            self._usual.leave()
            self._progress.phases.leave(self._calls.load)
            if not self._step.seen.loads % OFTEN:
                self._progress.flush_if_due()

    def close(self) -> None:
        """Wait for no batch any more."""
        self._progress.phases.leave(self._calls.load)
