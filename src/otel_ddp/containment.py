"""Keeps our own failures out of the training loop: logged once a place, counted, swallowed."""

from __future__ import annotations

import functools
import inspect
import logging
import signal
import sys
from collections.abc import Callable
from types import CodeType, TracebackType
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

# Whose errors may come up anywhere in what we do.
_KNOWN: Final = {"builtins", "torch", __name__.partition(".")[0], *sys.stdlib_module_names}


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
    """Raise again what is being handled, if it came in the middle of our code by chance.

    A signal handler of the user's has raised it, or another thread of his: a time limit, a
    preemption. It is meant for the training loop.
    """
    error = sys.exc_info()[1]
    if error is None or error.__traceback__ is None:
        return
    if _from_a_handler(error.__traceback__.tb_next) or _from_another_thread(error):
        raise


def _from_a_handler(trace: TracebackType | None) -> bool:
    if trace is None:
        return False  # raised right where it is handled
    handlers = {_code(signal.getsignal(each)) for each in signal.valid_signals()} - {None}
    while trace is not None:
        if trace.tb_frame.f_code in handlers or _was_given_its_caller(trace):
            return True
        trace = trace.tb_next
    return False


def _was_given_its_caller(trace: TracebackType) -> bool:
    """Whether it was called with the frame that called it, as Python does with signal handlers.

    A handler may have put another one in its place before it raised.
    """
    frame = trace.tb_frame
    code, caller = frame.f_code, frame.f_back
    several = code.co_flags & inspect.CO_VARARGS
    if caller is None or not (code.co_argcount or several):
        return False
    found = frame.f_locals
    named = code.co_varnames[: code.co_argcount]
    if any(found.get(name) is caller for name in named):
        return True
    rest = found.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount]) if several else ()
    return type(rest) is tuple and any(each is caller for each in rest)


def _from_another_thread(error: BaseException) -> bool:
    """Whether another thread had it raised in this one (PyThreadState_SetAsyncExc).

    Only a class is given there, so it says nothing; and it comes between two instructions of code
    that cannot have raised a class like that.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return (
        trace is not None
        and not error.args
        and not _is_known(type(error).__module__)
        and _is_known(trace.tb_frame.f_globals.get("__name__"))
    )


def _is_known(module: Any) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _KNOWN


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
