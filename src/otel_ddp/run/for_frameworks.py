"""`instrument` for programs that have no line of ours: it never raises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from otel_ddp import errors
from otel_ddp.errors import ConfigError
from otel_ddp.run import api, current_run, opening
from otel_ddp.run.run import Run, silent


def instrument(model: Any = None, **arguments: Any) -> Run:
    """As `otel_ddp.instrument`, but whatever is wrong is a line in the log.

    The run that it returns may record nothing. A program that has finished its run gets no second
    one, unless a framework names it: a trial of a search.
    """
    if "run" not in arguments and _is_over():
        return silent()
    return _open(partial(api.instrument, model, **arguments)) or silent()


def init(*, again: bool = False) -> Run:
    """As `otel_ddp.init`, of a program that tells another tracker something.

    *again*: another run after one that has been finished.
    """
    if opening.in_data_worker() or (_is_over() and not again):
        return silent()
    return _open(api.init) or silent()


def _is_over() -> bool:
    return api.current() is None and current_run.had_one()


@errors.contained()
def _open(call: Callable[[], Run]) -> Run | None:
    before = api.current()
    try:
        opened = call()
    except ConfigError as error:
        errors.warn_once("unasked", "Nothing is recorded of this program: %s", error)
        return None
    if opened is not before:
        opened.was_unasked = True
    return opened
