"""The trials of a search for hyperparameters: each is a run, and all are in one group."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_ddp.run import api
from otel_ddp.run.run import Run

# The arguments of `instrument` that decide on the name and the group of a run.
_NAMING = ("group", "run", "parallel")


class Trials:
    """Names the trials of one search. All ranks call it alike, so each name is the same on all."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """*arguments*: those of `instrument`, for the run that searches, if none is open."""
        named = {name: arguments[name] for name in _NAMING if name in arguments}
        searches = (api.current() or Run(named)).agreed_identity()
        self.group, self.run = searches.group or searches.run, searches.run
        self._count = 0

    def next(self, name: str, prefix: str) -> dict[str, str]:
        """The names of the next trial's run; *name*: what the search itself calls the trial."""
        trial = f"trial-{self._count}"
        self._count += 1
        title = f"{prefix}{name or trial}"
        return {"group": self.group, "run": f"{self.run}-{trial}", "name": title}
