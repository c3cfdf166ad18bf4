"""A node that is no longer heard: told where the other ranks wait for it, and not otherwise."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from make import labels_of, step_of
from otel_ddp.diagnosis.detector import Observation, RankState
from otel_ddp.diagnosis.stall.evidence import Position
from otel_ddp.diagnosis.stall.silence import Silence
from otel_ddp.diagnosis.verdict import Change

S = 1_000_000_000


class Run:
    """Six ranks on three nodes, half a second a round."""

    def __init__(self, step_s: float = 0.5) -> None:
        self.silence = Silence()
        self.now_ns, self.step, self.step_s = 1000 * S, 0, step_s
        self.since_ns = self.now_ns
        self.changes: list[Change] = []
        self.waits_in: frozenset[str] = frozenset()

    def go_on(
        self,
        seconds: float,
        *,
        unheard: Collection[int] = (),
        moves: bool = True,
        phase: str = "comm_wait",
    ) -> list[str]:
        """Kinds and states of what has changed meanwhile; *unheard*: nodes."""
        before = len(self.changes)
        for _ in range(int(seconds / self.step_s)):
            self.now_ns += int(self.step_s * S)
            if moves:
                self.step, self.since_ns = self.step + 1, self.now_ns
            for rank in range(6):
                if rank // 2 not in unheard:
                    self._feed(rank, phase, moves)
            self.changes += self.silence.poll(self.now_ns)
        return [
            f"{each.verdict.kind} {'opened' if each.opened else 'closed'}"
            for each in self.changes[before:]
        ]

    def _feed(self, rank: int, phase: str, moves: bool) -> None:
        took_ns = int(self.step_s * S)
        made = [step_of(self.step, self.now_ns - took_ns, [(4, took_ns)])] if moves else []
        labels = labels_of(rank, node=f"node-{rank // 2}")
        position = Position(
            *(labels, True, "running", self.step, phase, self.since_ns), waits_in=self.waits_in
        )
        seen = Observation(self.now_ns, made, position=position)
        self.silence.feed(RankState(labels, 6, 6), seen)


def test_a_node_whose_ranks_are_waited_for_is_told_after_12_s() -> None:
    run = Run()
    run.go_on(20, phase="backward")

    assert run.go_on(12, unheard={1}, moves=False) == []
    assert run.go_on(1, unheard={1}, moves=False) == ["silence opened"]

    verdict = run.changes[-1].verdict
    assert verdict.labels == (("group", "g"), ("run", "r"), ("node", "node-1"))
    assert (verdict.phase, verdict.step) == ("backward", 40)
    assert verdict.sentence == (
        "node-1, with ranks 2, 3, has not been heard for 12.5 s, and the other ranks wait. Look "
        "whether the node is still there: its power, its kernel, the network to it."
    )


def test_a_node_with_which_the_others_train_on_has_lost_its_link_alone() -> None:
    run = Run()
    run.go_on(20)

    assert run.go_on(60, unheard={1}) == []


@pytest.mark.parametrize("phase", ["checkpoint", "other"])
def test_a_rank_that_saves_or_uploads_its_model_waits_for_no_node(phase: str) -> None:
    run = Run()
    run.go_on(20)

    assert run.go_on(30, unheard={1}, moves=False, phase=phase) == []


def test_a_rank_in_a_collective_of_its_program_waits() -> None:
    run = Run()
    run.waits_in = frozenset({"other"})
    run.go_on(20)

    assert run.go_on(13, unheard={1}, moves=False, phase="other") == ["silence opened"]


def test_a_step_of_20_s_is_no_wait() -> None:
    run = Run(step_s=20.0)
    run.go_on(200)

    assert run.go_on(20, unheard={1}, moves=False) == []


def test_the_verdict_is_over_when_the_node_is_heard_again() -> None:
    run = Run()
    run.go_on(20)
    run.go_on(20, unheard={1}, moves=False)

    assert run.go_on(1) == ["silence closed"]
