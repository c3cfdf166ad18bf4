"""The stacks of a process on another node, which a person asks for on the lead's node."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from otel_ddp.agent.link import limits
from otel_ddp.agent.link import link_pb2 as wire
from otel_ddp.agent.link.runs.known import read_json
from otel_ddp.agent.reading.process import Process
from otel_ddp.agent.verdicts.answers import ANSWER_S

# Of all people at once.
_MOST_OPEN = 16
# One way and back, and the rounds of two loops, besides.
_ON_THE_WAY_S = 4.0


class Asked:
    """One question of one person."""

    def __init__(self, number: int, process: Process) -> None:
        self.number, self.process = number, process
        self.answer: Mapping[str, Any] = {}
        self.is_answered = threading.Event()


class AskedElsewhere:
    """One a run that this agent leads. Threads of the endpoint ask, while the loop goes on."""

    def __init__(self) -> None:
        self._numbers = itertools.count(time.time_ns())
        self._new: deque[Asked] = deque(maxlen=_MOST_OPEN)
        self._open: dict[int, Asked] = {}

    def stacks(self, process: Process) -> Mapping[str, Any]:
        """What the process answers; empty where nothing comes. Waits for it."""
        asked = Asked(next(self._numbers), process)
        for number in list(self._open)[: 1 - _MOST_OPEN]:
            # More are asked for than there is room for.
            self._open.pop(number, None)
        self._open[asked.number] = asked
        self._new.append(asked)
        asked.is_answered.wait(ANSWER_S + _ON_THE_WAY_S)
        self._open.pop(asked.number, None)
        return asked.answer

    def questions(self) -> Iterator[Asked]:
        """Those that are new."""
        while self._new:
            yield self._new.popleft()

    def take(self, told: wire.Told) -> None:
        """What has come; raises Senseless."""
        each = self._open.get(told.number)
        if each is not None:
            each.answer = read_json(told.content, limits.MOST_TOLD_BYTES)
            each.is_answered.set()
