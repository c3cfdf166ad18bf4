"""Keeps our own failures out of the training loop: logged once a place, counted, swallowed."""

from __future__ import annotations

import functools
import logging
import signal
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, Final, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger("otel_ddp")
swallowed: dict[str, int] = {}

# Our own test suite sets this, so that containment never hides a bug from us.
reraise = False

# Set by the run, so that the failures of a process show in its series.
count_failure: Callable[[], None] | None = None

# For the one path that cannot pay for a wrapper: what it catches, a contained function sees next.
ANYTHING: Final = Exception

_said: set[str] = set()


def contained(default: Any = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function fail without anyone noticing but the log and a counter."""

    def wrap(func: Callable[P, T]) -> Callable[P, T]:
        where = func.__qualname__

        @functools.wraps(func)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return func(*args, **kwargs)
            except Exception:
                if reraise:
                    raise
                failed(where)
                return default  # type: ignore[no-any-return]

        return guarded

    return wrap


def attempt(ask: Callable[[], T], otherwise: T) -> T:
    """What the user's code answers, or something else where it raises."""
    try:
        return ask()
    except Exception:
        pass_on()
        return otherwise


def pass_on() -> None:
    """Raise again what is being handled, if a signal handler of the user's has raised it.

    It came in the middle of our code by chance, and is meant for the training loop: a time limit,
    a preemption.
    """
    error = sys.exc_info()[1]
    trace = error.__traceback__.tb_next if error is not None and error.__traceback__ else None
    if trace is None:
        return  # raised right where it is handled
    handlers = {_code(signal.getsignal(each)) for each in signal.valid_signals()} - {None}
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            raise
        trace = trace.tb_next


def _code(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    if hasattr(handler, "__code__"):
        return cast(CodeType, handler.__code__)
    return getattr(type(handler).__call__, "__code__", None) if callable(handler) else None


def failed(where: str) -> None:
    """Count the exception being handled; log it the first time it happens at this place."""
    pass_on()
    swallowed[where] = swallowed.get(where, 0) + 1
    if swallowed[where] == 1:
        log.warning("%s failed; training goes on without it.", where, exc_info=True)
    if count_failure is not None:
        attempt(count_failure, None)


def say_once(place: str, text: str, *args: object) -> None:
    """Warn once a place and process."""
    if place not in _said:
        _said.add(place)
        log.warning(text, *args)
