"""What the lead has answered, bounded: a lead that lies costs no more than one that does not."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from otel_ddp.agent.link.link_pb2 import Question

_MOST_ANSWERS = 32
_MOST_QUESTIONS_A_SECOND = 32
_KINDS = frozenset(Question.Kind.values()) - {Question.NONE}


class Answered:
    """The thread of links adds to it, and the agent's loop takes all."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._answers: deque[Any] = deque(maxlen=_MOST_ANSWERS)
        self._second = self._asked = 0
        self.refused_questions = 0

    def add(self, answer: Any) -> None:
        """Keep it if it says more than that a report has come; without questions beyond measure."""
        if (now := int(self._clock())) != self._second:
            self._second, self._asked = now, 0
        known = [each for each in answer.questions if each.kind in _KINDS]
        kept = known[: max(_MOST_QUESTIONS_A_SECOND - self._asked, 0)]
        if len(kept) < len(answer.questions):
            self.refused_questions += len(answer.questions) - len(kept)
            del answer.questions[:]
            answer.questions.extend(kept)
        self._asked += len(kept)
        if answer.questions or answer.judged or answer.lacking:
            self._answers.append(answer)

    def take(self) -> list[Any]:
        """All, as they came."""
        found = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._answers.popleft())
        return found
