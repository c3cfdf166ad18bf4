"""What frameworks call: `instrument` that never raises, and the trials of a search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_ddp import errors
from otel_ddp.errors import ConfigError
from otel_ddp.run import api, current_run
from otel_ddp.run.run import Origin, Run, silent

# -- programs that have no line of ours: whatever is wrong is a line in the log


def instrument(model: Any = None, **arguments: Any) -> Run:
    """As `otel_ddp.instrument`, but never raises: the run that it returns may record nothing.

    A program that has finished its run gets no second one.
    """
    if api.current() is None and current_run.had_one():
        return silent()
    return instrument_again(model, **arguments)


def instrument_again(model: Any = None, **arguments: Any) -> Run:
    """As `instrument`, also after a run that a framework has ended for the next one."""
    return _instrument(model, arguments) or silent()


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


# -- the trials of a search for hyperparameters: each is a run, and all are in one group

# The arguments of `instrument` that decide on the name and the group of a run.
_NAMING = ("group", "run", "parallel")


class Trials:
    """Names the trials of one search. All ranks call it alike, so each name is the same on all."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """*arguments*: those of `instrument`, for the run that searches, if none is open."""
        named = {name: arguments[name] for name in _NAMING if name in arguments}
        searches = (api.current() or Run(Origin(named))).agreed_identity()
        self.searching = {"group": searches.group, "run": searches.run}
        """The names of the run that searches."""
        self.trains = False
        """Whether a trial has begun and not ended: it was pruned, or failed, if another begins."""
        self._count = 0

    def next(self, name: str, prefix: str) -> dict[str, str]:
        """The names of the next trial's run; *name*: what the search itself calls the trial."""
        trial = f"trial-{self._count}"
        self._count += 1
        self.trains = True
        run = self.searching["run"]
        title = f"{prefix}{name or trial}"
        return {"group": self.searching["group"] or run, "run": f"{run}-{trial}", "name": title}


# A search that goes on in this process, whichever object of a framework leads it.
_open: Trials | None = None


def open_search() -> Trials | None:
    """The search whose last trial may be open."""
    return _open


def begin_search(arguments: Mapping[str, Any]) -> Trials:
    """A search begins with its first trial; raises ConfigError."""
    global _open
    _open = Trials(arguments)
    return _open


def end_search() -> None:
    """A training that is no trial begins."""
    global _open
    _open = None


@errors.contained()
def begin_search_unasked(arguments: Mapping[str, Any]) -> Trials | None:
    """As `begin_search`, for programs without a line of ours; None: nothing is to be recorded."""
    if api.current() is None and current_run.had_one():
        return None  # It has finished its run, and gets no second one.
    try:
        return begin_search(arguments)
    except ConfigError as error:
        errors.warn_once("unasked", "Nothing is recorded of this program: %s", error)
        return None
