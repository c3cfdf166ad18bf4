"""Stacks that a person asks for on the lead's node, of a process of another node."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.runs import pack
from otel_ddp.agent.link.runs.node_source import NodeSource
from otel_ddp.agent.verdicts.answers import ANSWER_S, AskedProcess, asked

# Of all people at once.
_MOST_OPEN = 16
_LARGEST_ANSWER = 1 << 20
_TOO_LARGE = "its answer is too large to be sent here (over 1 MiB): ask for it on its node"
# One way and back, and the rounds of two loops, besides.
_ON_THE_WAY_S = 4.0


# -- on the node of the process


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
                if len(content) > _LARGEST_ANSWER:
                    content = json.dumps({"why": _TOO_LARGE}).encode()
                self._done.append(wire.Told(number=each.number, content=content))
        return bool(self._done)

    def take(self) -> list[wire.Told]:
        """The answers since the last call."""
        done, self._done = self._done, []
        return done


# -- on the node of the lead


class _Asked:
    """One question of one person."""

    def __init__(self, number: int, source: NodeSource) -> None:
        self.number, self.source = number, source
        self.answer: Mapping[str, Any] = {}
        self.is_answered = threading.Event()


class StacksElsewhere:
    """One a run that this agent leads. Threads of the endpoint ask, while the loop goes on."""

    def __init__(self) -> None:
        self._numbers = itertools.count(time.time_ns())
        self._new: deque[_Asked] = deque(maxlen=_MOST_OPEN)
        self._open: dict[int, _Asked] = {}

    def ask(self, source: NodeSource) -> Mapping[str, Any]:
        """What the process answers; empty where nothing comes. Waits for it."""
        asked_one = _Asked(next(self._numbers), source)
        self._new.append(asked_one)
        asked_one.is_answered.wait(ANSWER_S + _ON_THE_WAY_S)
        self._open.pop(asked_one.number, None)
        return asked_one.answer

    def questions(self) -> Iterator[tuple[NodeSource, int]]:
        """The process and the number of each new question."""
        while self._new:
            each = self._new.popleft()
            self._open[each.number] = each
            yield each.source, each.number

    def take(self, told: wire.Told) -> None:
        """What has come; raises Senseless."""
        each = self._open.get(told.number)
        if each is not None:
            each.answer = pack.unpack_json(told.content[:_LARGEST_ANSWER])
            each.is_answered.set()
