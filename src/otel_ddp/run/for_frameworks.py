"""`instrument` for programs that have no line of ours: it never raises."""

from __future__ import annotations

from typing import Any

from otel_ddp import errors
from otel_ddp.errors import ConfigError
from otel_ddp.run import api, current_run
from otel_ddp.run.run import Run, silent


def instrument(model: Any = None, **arguments: Any) -> Run:
    """As `otel_ddp.instrument`, but whatever is wrong is a line in the log.

    The run that it returns may record nothing. A program that has finished its run gets no second
    one, unless a framework names it: a trial of a search.
    """
    if "run" not in arguments and api.current() is None and current_run.had_one():
        return silent()
    return _instrument(model, arguments) or silent()


def unasked() -> Run | None:
    """The run for what a program logs elsewhere, unless it has opened its run itself.

    Such a program says by its own calls what is recorded.
    """
    run = api.current()
    return run if run is not None and run.was_unasked else None


@errors.contained()
def _instrument(model: Any, arguments: dict[str, Any]) -> Run | None:
    before = api.current()
    try:
        opened = api.instrument(model, **arguments)
    except ConfigError as error:
        errors.warn_once("unasked", "Nothing is recorded of this program: %s", error)
        return None
    if opened is not before:
        opened.was_unasked = True
    return opened
