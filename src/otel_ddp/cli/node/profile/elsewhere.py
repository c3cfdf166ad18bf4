"""A rank of another node that is profiled: the agent here asks the agent there.

The trace stays on that node, and the table comes here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from otel_ddp.cli.node.profile.choice import Candidate
from otel_ddp.cli.node.profile.operators import Totals
from otel_ddp.cli.node.profile.window import Window
from otel_ddp.cli.text import cell, integer, mappings, number

_POLL_S = 0.5


class WindowElsewhere(Window):
    """Of a rank of another node. That node sets the limits on its time."""

    def __init__(self, rank: Candidate, ask: Callable[..., Mapping[str, Any] | str]) -> None:
        """*ask*: the agent of this node; a sentence where it does not answer."""
        super().__init__(rank)
        self._ask_agent = ask
        self._number = 0
        self._told: Mapping[str, Any] = {}
        self._poll_at_s = 0.0

    def ask(self, steps: int, wait_s: float) -> None:
        process = self.rank.process
        answer = self._ask(
            group=process.group, run=process.run, rank=str(self.rank.rank), steps=str(steps)
        )
        if asked := integer(answer.get("number")):
            self._number, self.state = asked, "recording"
        else:
            self.refuse(cell(answer.get("why"), "no answer"))

    def poll(self) -> None:
        if self.is_over or time.monotonic() < self._poll_at_s:
            return
        self._poll_at_s = time.monotonic() + _POLL_S
        self._told = self._ask(number=str(self._number))
        if why := cell(self._told.get("why")) if "ranks" not in self._told else "":
            self.refuse(why)
        elif rows := mappings(self._told.get("ranks")):
            self.state = "written"
            self.steps = integer(rows[0].get("steps")) or 0
            self.first_step = integer(rows[0].get("first_step"))
        elif self._told:
            self.refuse("its node answers what makes no sense: is it of another version?")

    def _ask(self, **query: str) -> Mapping[str, Any]:
        answer = self._ask_agent(**query)
        return {"why": answer} if isinstance(answer, str) else answer

    def totals(self) -> Totals:
        own = {}
        for row in mappings(self._told.get("table")):
            times_s = row.get("times_s")
            seconds = number(times_s[0]) if isinstance(times_s, list) and times_s else None
            if seconds is None:
                raise ValueError("its node tells a row without a time")
            own[str(row.get("operator")), row.get("on_device") is True] = seconds
        return Totals(number(mappings(self._told["ranks"])[0].get("step_s")) or 0.0, own)

    def keep(self) -> str:
        name = mappings(self._told["ranks"])[0].get("file")
        return os.path.join(cell(self._told.get("folder")), cell(name))
