"""Times the pauses of the garbage collector, without running Python code during them."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from operator import getitem, setitem, sub
from typing import Any

from otel_ddp import errors
from otel_ddp.recording.steps import Work
from otel_ddp.torch.steps.stepper import Stepper

_callback: Any = None


def attach(stepper: Stepper, *, clock: Callable[[], int] = time.monotonic_ns) -> None:
    """Time every collection."""
    global _callback
    detach()
    made = _callback = _timed(stepper.progress.work, clock)
    gc.callbacks.append(made)


def detach() -> None:
    """Time no collection any more."""
    global _callback
    try:
        gc.callbacks.remove(_callback)
    except ValueError:  # not there
        errors.reraise_foreign()
    _callback = None


def _timed(work: Work, clock: Callable[[], int]) -> Any:
    """What the collector calls with a phase and a dictionary.

    It must be no function of Python's. A signal that came during the collection would be handled on
    entering it, and what the handler raises there, Ctrl-C included, is lost in the collector. So it
    is `getattr(phases, "start" or "stop", dictionary)`: reading that attribute takes the next item
    of an iterator, and this item reads the clock.
    """
    # A collection that is under way already is timed from here on.
    began = [clock()]
    starts = map(partial(setitem, began, 0), iter(clock, None))
    lasted = map(sub, iter(clock, None), iter(partial(getitem, began, 0), None))
    totals = accumulate(lasted, initial=work.gc_ns)
    next(totals)  # the initial value
    stops = map(partial(setattr, work, "gc_ns"), totals)
    phases = {"start": property(partial(next, starts)), "stop": property(partial(next, stops))}
    return partial(getattr, type("_Phases", (), phases)())
