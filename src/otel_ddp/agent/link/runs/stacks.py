"""Stacks of a process here that a person asks for on the lead's node."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from otel_ddp.agent.link import limits
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.verdicts.answers import ANSWER_S, AskedProcess, asked

# Of all people at once.
_MOST_OPEN = 16
_TOO_LARGE = "its answer is too large to be sent here (over 1 MiB): ask for it on its node"


class _Open(NamedTuple):
    number: int
    process: AskedProcess
    until: float


class StacksHere:
    """One a run that is led by another agent. Called from the agent's loop."""

    def __init__(self, ask: Callable[[Iterable[Path]], Iterable[AskedProcess]] = asked) -> None:
        self._ask = ask
        self._open: list[_Open] = []
        self._done: list[wire.Told] = []

    def ask(self, number: int, journal: Path) -> None:
        """The lead asks for the stacks of this process."""
        if len(self._open) >= _MOST_OPEN:
            return
        for process in self._ask([journal]):
            self._open.append(_Open(number, process, time.monotonic() + ANSWER_S))

    def poll(self) -> bool:
        """Look for answers; whether there is one."""
        now = time.monotonic()
        for each in list(self._open):
            if each.process.is_done() or now > each.until:
                self._open.remove(each)
                content = json.dumps(each.process.to_json()).encode()
                if len(content) > limits.MOST_TOLD_BYTES:
                    content = json.dumps({"why": _TOO_LARGE}).encode()
                self._done.append(wire.Told(number=each.number, content=content))
        return bool(self._done)

    def take(self) -> list[wire.Told]:
        """The answers since the last call, as many as fit into a report: the others wait."""
        sizes = accumulate(len(each.content) for each in self._done)
        fit = sum(size <= limits.MOST_TOLD_BYTES for size in sizes)
        done, self._done = self._done[:fit], self._done[fit:]
        return done
