"""Stacks that a person asks for on the lead's node: the question there, and the answer here."""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, TimeoutError
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp.agent.link import limits
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.known import read_json
from otel_ddp.agent.reading.process import Process
from otel_ddp.agent.verdicts.answers import ANSWER_S, AskedProcess, asked

# Of all people at once.
_MOST_OPEN = 16
# One way and back, and the rounds of two loops, besides.
_ON_THE_WAY_S = 4.0
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


class Asked(NamedTuple):
    """One question of one person."""

    number: int
    process: Process
    answer: Future[Mapping[str, Any]]


class AskedElsewhere:
    """One a run that this agent leads. Threads of the endpoint ask, while the loop goes on."""

    def __init__(self) -> None:
        self._numbers = itertools.count(time.time_ns())
        self._new: deque[Asked] = deque(maxlen=_MOST_OPEN)
        self._open: dict[int, Asked] = {}

    def stacks(self, process: Process) -> Mapping[str, Any]:
        """What the process answers; empty where nothing comes. Waits for it."""
        asked = Asked(next(self._numbers), process, Future())
        for number in list(self._open)[: 1 - _MOST_OPEN]:
            # More are asked for than there is room for.
            self._open.pop(number, None)
        self._open[asked.number] = asked
        self._new.append(asked)
        try:
            return asked.answer.result(ANSWER_S + _ON_THE_WAY_S)
        except TimeoutError:
            return {}
        finally:
            self._open.pop(asked.number, None)

    def questions(self) -> Iterator[Asked]:
        """Those that are new."""
        while self._new:
            yield self._new.popleft()

    def take(self, told: wire.Told) -> None:
        """What has come; raises Senseless."""
        if told.number in self._open:
            answer = read_json(told.content, limits.MOST_TOLD_BYTES)
            if (asked := self._open.pop(told.number, None)) is not None:
                asked.answer.set_result(answer)
