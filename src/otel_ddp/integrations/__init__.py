"""Shared by the integrations: argument checks, phases between events, and automatic runs.

The module for a framework imports the framework. The module `trackers` imports no tracker: it wraps
those that the program has imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import otel_ddp
from otel_ddp import errors


def checked(arguments: dict[str, Any]) -> dict[str, Any]:
    """Check that `instrument` accepts these arguments, and return them. Else raises TypeError."""
    inspect.signature(otel_ddp.instrument).bind(None, **arguments)
    return arguments


class OpenPhase:
    """Holds the open phase, if any.

    To begin a phase ends the previous one, because frameworks may skip the event at its end.
    """

    def __init__(self) -> None:
        self.name: str = ""
        self._stack = ExitStack()

    def begin(self, name: str) -> None:
        """End the open phase, if any, and begin the phase *name*."""
        self.end()
        self._stack.enter_context(otel_ddp.phase(name))
        self.name = name

    def end(self) -> None:
        """End the open phase, if any."""
        self.name = ""
        self._stack.close()


# -- automatic runs: of programs that do not call otel_ddp, whose code must not get an exception


def instrument(model: Any = None, **arguments: Any) -> otel_ddp.Run:
    """Like `otel_ddp.instrument`, but logs an error instead of raising it.

    After an error, or if the program has finished its run, returns a run that records nothing.
    """
    if _is_over():
        return _silent()
    return _open(partial(otel_ddp.instrument, model, **arguments)) or _silent()


def init(*, again: bool = False) -> otel_ddp.Run:
    """Like `otel_ddp.init`, but logs an error instead of raising it.

    *again*: whether to open a run even if the program has finished one before.
    """
    from otel_ddp.run import opening

    if opening.in_data_worker() or (_is_over() and not again):
        return _silent()
    return _open(otel_ddp.init) or _silent()


def _is_over() -> bool:
    from otel_ddp.run import current_run

    return otel_ddp.current() is None and current_run.had_one()


@errors.contained()
def _open(call: Callable[[], otel_ddp.Run]) -> otel_ddp.Run | None:
    before = otel_ddp.current()
    try:
        opened = call()
    except otel_ddp.ConfigError as error:
        errors.warn_once("automatic", "Nothing is recorded of this program: %s", error)
        return None
    if opened is not before:
        opened.was_automatic = True
    return opened


def _silent() -> otel_ddp.Run:
    from otel_ddp.run.run import silent

    return silent()
