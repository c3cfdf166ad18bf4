"""Ranks as detectors see them: what is known of each, and its new steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from make import labels_of
from otel_ddp.diagnosis.detector import Detector, Observation, RankState
from otel_ddp.diagnosis.step_facts import StepFacts


class Told:
    """Detectors, and what they were told of each rank."""

    def __init__(self, *detectors: Detector, **known: Any) -> None:
        """*known*: of each rank."""
        self.detectors = detectors
        self.known = known
        self.states: dict[int, RankState] = {}

    def know(self, rank: int, **more: Any) -> None:
        """From now on so much more is known of this rank."""
        self.states[rank] = self._state(rank)._replace(**more)
        self.feed(rank)

    def feed(self, rank: int, facts: Sequence[StepFacts] = ()) -> None:
        for each in self.detectors:
            each.feed(self._state(rank), Observation(facts=facts))

    def forget(self, rank: int) -> None:
        self.states.pop(rank, None)
        for each in self.detectors:
            each.forget(labels_of(rank))

    def _state(self, rank: int) -> RankState:
        return self.states.get(rank, RankState(labels_of(rank), **self.known))
