"""The exceptions that users may catch, and the containment of our own failures."""

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

# How often each function of ours has failed.
failures: dict[str, int] = {}

# If True, `contained` catches no errors. Our tests set it, so that no bug stays hidden.
raise_failures = False

# The open run sets this function, which counts a failure in a series of the run.
count_failure: Callable[[], None] | None = None

# For an `except` clause in a place that cannot use the decorator `contained`, such as a hot path.
ANY_ERROR: Final = Exception

# The places for which `warn_once` has already warned.
warned: set[str] = set()

# Our own code may raise exceptions of these packages. If it is interrupted by an exception of
# another package, the exception comes from outside.
_KNOWN: Final = {"builtins", "torch", __name__.partition(".")[0], *sys.stdlib_module_names}


class OtelDdpError(Exception):
    """The base class of this library's exceptions."""


class ConfigError(OtelDdpError, ValueError):
    """An invalid setting or argument; the text names the expected values."""


class MissingDependency(OtelDdpError, ImportError):
    """The requested feature needs a package that is not installed."""


def contained(default: Any = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A decorator that catches any exception, records the failure, and returns *default*."""

    def wrap(func: Callable[P, T]) -> Callable[P, T]:
        where = func.__qualname__

        @functools.wraps(func)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return func(*args, **kwargs)
            except Exception:
                if raise_failures:
                    raise
                record_failure(where)
                return default  # type: ignore[no-any-return]

        return guarded

    return wrap


def attempt(call: Callable[[], T], default: T) -> T:
    """Call code of the user, and return its result, or *default* if it raises."""
    try:
        return call()
    except Exception:
        reraise_foreign()
        return default


def reraise_foreign() -> None:
    """Re-raise the current exception if it came from outside and only interrupted our code.

    A signal handler of the user or another thread may raise it at any moment, as for a time limit
    or a preemption. It is meant for the training loop.
    """
    error = sys.exc_info()[1]
    if error is None or error.__traceback__ is None:
        return
    if _from_a_handler(error.__traceback__.tb_next) or _from_another_thread(error):
        raise


def _from_a_handler(trace: TracebackType | None) -> bool:
    if trace is None:
        return False  # the function that caught the error has raised it itself, so no handler has
    handlers = {_code(signal.getsignal(each)) for each in signal.valid_signals()} - {None}
    while trace is not None:
        if trace.tb_frame.f_code in handlers or _was_given_its_caller(trace):
            return True
        trace = trace.tb_next
    return False


def _was_given_its_caller(trace: TracebackType) -> bool:
    """Whether the function was called with the frame of its caller as an argument.

    Python calls a signal handler with the interrupted frame. To compare the function with the
    registered handlers is not enough: a handler may register another one before it raises.
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
    """Whether another thread raised the error in this thread (PyThreadState_SetAsyncExc).

    That function takes only a class, so the error has no arguments. Its class is from a package
    outside _KNOWN, but the code that it interrupted is from one in _KNOWN, which raises no such
    class.
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


def record_failure(where: str) -> None:
    """Count the current exception as a failure at *where*, and log the first one of each place."""
    reraise_foreign()
    failures[where] = failures.get(where, 0) + 1
    if failures[where] == 1:
        log.warning("%s failed; training goes on without it.", where, exc_info=True)
    if count_failure is not None:
        attempt(count_failure, None)


def warn_once(place: str, text: str, *args: object) -> None:
    """Log a warning, but only once for each *place* in this process."""
    if place not in warned:
        warned.add(place)
        log.warning(text, *args)
