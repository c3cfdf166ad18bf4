"""Ranks as detectors see them: what is known of each, and its new steps."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from make import is_measured, labels_of, step_facts
from otel_ddp.diagnosis.detector import Detector, Observation, RankState
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler.detector import Stragglers
from otel_ddp.diagnosis.straggler.finding import Report
from otel_ddp.diagnosis.verdict import Change


def summary(changes: list[Change]) -> list[tuple[str, str, str, bool]]:
    """Kind; rank, or the node where it is of a whole one; phase; opened."""
    found = []
    for verdict, opened in changes:
        labels = dict(verdict.labels)
        who = labels.get("rank", labels.get("node", ""))
        found.append((verdict.kind, who, verdict.phase, opened))
    return found


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
        labels = self._state(rank).labels
        self.states.pop(rank, None)
        for each in self.detectors:
            each.forget(labels)

    def _state(self, rank: int) -> RankState:
        return self.states.get(rank, RankState(labels_of(rank), **self.known))


# What each rank needs in a step, in each phase; and how long the step takes.
PLAIN_S = {"data": 0.005, "forward": 0.025, "backward": 0.050, "optimizer": 0.010, "other": 0.005}
STEP_S = 0.1


class Job:
    """Ranks that train together, 100 ms a step."""

    def __init__(
        self,
        ranks: int = 4,
        *,
        nodes: int = 1,
        slower: float = 1.0,
        vary: float = 0.02,
        **known: Any,
    ) -> None:
        """*nodes*: over so many the ranks are divided; the first is `n1`.

        *slower*: a step takes so many times as long. *vary*: by this share at most, phases differ.
        """
        self.slower, self.vary = slower, vary
        self.detector = Stragglers()
        self.told = Told(self.detector, **known)
        self.ranks = list(range(ranks))
        for rank in self.ranks if nodes > 1 else []:
            labels = labels_of(rank, node=f"n{rank * nodes // ranks + 1}")
            self.told.states[rank] = RankState(labels, **known)
        self.number = 0
        self.now_ns = 1_700_000_000 * 10**9
        self.counts_from: dict[int, int] = {}
        self.one_of: dict[int, int] = {}
        """By rank: of how many steps it measures one."""
        self._chance = random.Random(1)

    def facts(self, rank: int, more: Mapping[str, float], took_s: float, **given: Any) -> StepFacts:
        number = self.number + self.counts_from.get(rank, 0)
        if not is_measured(number, self.one_of.get(rank, 1)):
            return step_facts(number, self.now_ns, {}, took_s * 1000, wait_ns=0, measured=False)
        # A little noise: ranks that are equal to the last bit have no order to speak of.
        phases_ms = {
            word: (usual_s * self.slower + more.get(word, 0.0)) * self._varied() * 1000
            for word, usual_s in PLAIN_S.items()
        }
        return step_facts(number, self.now_ns, phases_ms, took_s * 1000, **{"work": 1000, **given})

    def _varied(self) -> float:
        return self._chance.uniform(1 - self.vary, 1 + self.vary)

    def steps(
        self,
        steps: int,
        late: Mapping[int, Mapping[str, float]] | None = None,
        given: Mapping[int, Mapping[str, Any]] | None = None,
        silent: tuple[int, ...] = (),
    ) -> list[Change]:
        late, given = late or {}, given or {}
        took_s = STEP_S * self.slower + max([sum(more.values()) for more in late.values()] or [0.0])
        changes: list[Change] = []
        for _ in range(steps):
            self.number += 1
            self.now_ns += round(took_s * 1e9)
            for rank in self.ranks:
                if rank not in silent:
                    facts = self.facts(rank, late.get(rank, {}), took_s, **given.get(rank, {}))
                    self.told.feed(rank, [facts])
            changes += self.detector.poll(0)
        return changes

    def report(self) -> Report:
        return self.detector.report()
