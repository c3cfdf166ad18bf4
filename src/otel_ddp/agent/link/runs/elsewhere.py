"""What a person asks on the lead's node of a process on another node: its stacks, or a profile."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from otel_ddp.agent.link import limits
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.runs import pack
from otel_ddp.agent.link.runs.node_source import NodeSource
from otel_ddp.agent.verdicts.answers import ANSWER_S

# Of all people at once.
_MOST_OPEN = 16
# One way and back, and the rounds of two loops, besides.
_ON_THE_WAY_S = 4.0
# A node that was not heard for so long may have lost the question.
_LOST_NS = 60_000_000_000


class Asked:
    """One question of one person."""

    def __init__(self, number: int, source: NodeSource, kind: int, steps: int) -> None:
        self.number, self.source, self.kind, self.steps = number, source, kind, steps
        self.answer: Mapping[str, Any] = {}
        self.is_answered = threading.Event()


class AskedElsewhere:
    """One a run that this agent leads. Threads of the endpoint ask, while the loop goes on."""

    def __init__(self) -> None:
        self._numbers = itertools.count(time.time_ns())
        self._new: deque[Asked] = deque(maxlen=_MOST_OPEN)
        self._open: dict[int, Asked] = {}

    def stacks(self, source: NodeSource) -> Mapping[str, Any]:
        """What the process answers; empty where nothing comes. Waits for it."""
        asked = self._ask(source, wire.Question.STACKS)
        asked.is_answered.wait(ANSWER_S + _ON_THE_WAY_S)
        self._open.pop(asked.number, None)
        return asked.answer

    def profile(self, source: NodeSource, steps: int) -> int:
        """The number by which `told` knows the answer: the steps take as long as they take."""
        return self._ask(source, wire.Question.PROFILE, steps).number

    def _ask(self, source: NodeSource, kind: int, steps: int = 0) -> Asked:
        asked = Asked(next(self._numbers), source, kind, steps)
        for number in list(self._open)[: 1 - _MOST_OPEN]:
            # The person who asked has gone, or asks for more than there is room for.
            self._open.pop(number, None)
        self._open[asked.number] = asked
        self._new.append(asked)
        return asked

    def told(self, number: int, now_ns: int) -> Mapping[str, Any] | None:
        """The answer, once; empty while it is awaited. None: it will not come."""
        asked = self._open.get(number)
        if asked is None or now_ns - asked.source.heard_ns > _LOST_NS:
            return None
        if asked.is_answered.is_set():
            self._open.pop(number, None)
        return asked.answer

    def questions(self) -> Iterator[Asked]:
        """Those that are new."""
        while self._new:
            yield self._new.popleft()

    def take(self, told: wire.Told) -> None:
        """What has come; raises Senseless."""
        each = self._open.get(told.number)
        if each is not None:
            each.answer = pack.unpack_json(told.content[: limits.MOST_TOLD_BYTES])
            each.is_answered.set()
