"""Pauses of Python's garbage collector, timed without a line of Python."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from operator import getitem, setitem, sub
from typing import Any

from otel_ddp import containment
from otel_ddp.recording.progress import Progress
from otel_ddp.torch.stepper import Stepper

_callback: Any = None


def attach(stepper: Stepper, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
    """Time every collection."""
    global _callback
    detach()
    made = _callback = _timed(stepper.progress, clock)
    gc.callbacks.append(made)


def detach() -> None:
    """Time none."""
    global _callback
    try:
        gc.callbacks.remove(_callback)
    except ValueError:  # not there
        containment.reraise_foreign()
    _callback = None


def _timed(progress: Progress, clock: Callable[[], int]) -> Any:
    """What the collector may call with a phase and a dictionary.

    No function of Python's: a signal that came during the collection would be handled on entering
    it, and whatever the handler raises there, Ctrl-C included, is lost in the collector. So it is
    `getattr(phases, "start" or "stop", dictionary)`, and to ask for that attribute is to ask an
    iterator for its next item, which reads the clock.
    """
    # A collection that is already under way is timed from here on.
    began = [clock()]
    starts = map(partial(setitem, began, 0), iter(clock, None))
    lasted = map(sub, iter(clock, None), iter(partial(getitem, began, 0), None))
    totals = accumulate(lasted, initial=progress.gc_ns)
    next(totals)  # what it was before
    stops = map(partial(setattr, progress, "gc_ns"), totals)
    phases = {"start": property(partial(next, starts)), "stop": property(partial(next, stops))}
    return partial(getattr, type("_Phases", (), phases)())
