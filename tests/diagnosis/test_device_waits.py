"""Waits inside phases, by how long collectives took the devices of all ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from make import labels_of, step_of
from otel_ddp.agent.reading.steps import Step
from otel_ddp.diagnosis.arrivals import (
    NOT_TIMED,
    NOTHING_NEW,
    Arrival,
    Comparison,
    Sample,
    compare,
)
from otel_ddp.diagnosis.detector import Observation, RankState
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler.detector import Stragglers
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.vocabulary.words import PHASES, WORK_PHASES

MS = 1_000_000
LAYERS = 4
LAYER_MS = 5.0
HOST = {"forward": 4, "backward": 6, "optimizer": 1}
FORWARD, BACKWARD = WORK_PHASES.index("forward"), WORK_PHASES.index("backward")


class Training:
    """Ranks that gather each layer in forward and in backward, and wait there for each other."""

    def __init__(self, ranks: int = 3, hidden: bool = False) -> None:
        """*hidden*: layers are gathered so early that nobody waits for them."""
        self.ranks = range(ranks)
        self.hidden = hidden
        self.chance = random.Random(1)
        self.number = 0
        self.arrivals: list[list[Arrival]] = [[] for _ in self.ranks]
        self.steps: list[list[Step]] = [[] for _ in self.ranks]
        self.on_device: list[list[StepFacts]] = [[] for _ in self.ranks]

    def step(
        self, more_ms: Mapping[int, Mapping[str, float]] | None = None, steps: int = 1
    ) -> None:
        for _ in range(steps):
            self.number += 1
            self._step(more_ms or {})

    def _step(self, more_ms: Mapping[int, Mapping[str, float]]) -> None:
        phases_ms = [dict.fromkeys(WORK_PHASES, 0.0) for _ in self.ranks]
        began_ns = self.number * 1000 * MS
        for at, phase in enumerate(("forward", "backward")):
            for layer in range(LAYERS):
                work_ms = [
                    LAYER_MS * self.chance.uniform(0.95, 1.05)
                    + more_ms.get(rank, {}).get(phase, 0.0) / LAYERS
                    for rank in self.ranks
                ]
                for rank in self.ranks:
                    wait_ms = max(work_ms) - work_ms[rank]
                    # Each is launched 1 ms after the one before; its transfer takes 2 ms.
                    launched_ns = began_ns + (4 * at + layer) * MS
                    number = len(self.arrivals[rank])
                    took_ns = round((2 + wait_ms) * MS)
                    self.arrivals[rank].append(
                        Arrival("0", number, "nccl:all_gather", launched_ns, took_ns)
                    )
                    phases_ms[rank][phase] += work_ms[rank] + (0 if self.hidden else wait_ms)
        pieces = [(PHASES[phase], ms * MS) for phase, ms in HOST.items()]
        took_ns = round(max(sum(each.values()) for each in phases_ms) * MS)
        for rank in self.ranks:
            self.steps[rank].append(step_of(self.number, began_ns, pieces))
            found_ns = tuple(round(ms * MS) for ms in phases_ms[rank].values())
            self.on_device[rank].append(
                StepFacts(self.number, 0, took_ns, took_ns - sum(found_ns), found_ns, {}, False, 0)
            )

    def samples(self) -> dict[Labels, Sample]:
        sizes = {"0": len(self.ranks)}
        return {labels_of(r): Sample(self.arrivals[r], sizes) for r in self.ranks}

    def compared(
        self, after: int = -1, samples: Mapping[Labels, Sample] | None = None
    ) -> Comparison:
        return compare(
            samples or self.samples(),
            {labels_of(rank): self.steps[rank] for rank in self.ranks},
            {labels_of(rank): self.on_device[rank] for rank in self.ranks},
            after,
        )

    def work_ms(self, rank: int, phase: int) -> float:
        facts = self.compared().facts[labels_of(rank)]
        return sum(each.phases_ns[phase] for each in facts) / len(facts) / MS


def test_waits_are_taken_out_of_the_phases_that_they_are_in() -> None:
    training = Training()
    training.step({1: {"backward": 8.0}}, 40)

    assert training.compared().why == ""
    for rank in (0, 2):
        assert 19.5 <= training.work_ms(rank, FORWARD) <= 20.5
        assert 19.5 <= training.work_ms(rank, BACKWARD) <= 20.5
    assert 27.5 <= training.work_ms(1, BACKWARD) <= 28.5


def test_waits_that_the_devices_are_known_to_have_are_not_taken_out_twice() -> None:
    training = Training()
    training.step({1: {"backward": 8.0}}, 40)
    # The last collective is one that the devices wait for after backward.
    for rank in training.ranks:
        last_ns = [
            each.took_ns or 0 for each in training.arrivals[rank][2 * LAYERS - 1 :: 2 * LAYERS]
        ]
        training.on_device[rank] = [
            step._replace(
                wait_ns=step.wait_ns + took_ns,
                phases_ns=tuple(
                    ns - (at == BACKWARD) * (took_ns - 2 * MS)
                    for at, ns in enumerate(step.phases_ns)
                ),
            )
            for step, took_ns in zip(training.on_device[rank], last_ns, strict=True)
        ]

    for rank in (0, 2):
        assert 19.5 <= training.work_ms(rank, BACKWARD) <= 20.5
    assert 27.5 <= training.work_ms(1, BACKWARD) <= 28.5


def test_waits_that_are_hidden_behind_work_are_not_taken_out() -> None:
    training = Training(hidden=True)
    training.step({1: {"forward": 8.0, "backward": 8.0}}, 120)

    assert training.compared().why == ""
    assert 19.5 <= training.work_ms(0, FORWARD) <= 20.5


def test_steps_of_which_a_collective_is_not_known_everywhere_are_left_out() -> None:
    training = Training(2)
    training.step({1: {"backward": 8.0}}, 40)
    # The last step is under way on one of the devices.
    training.arrivals[1][-1] = training.arrivals[1][-1]._replace(took_ns=None)
    # The recorder of the other has forgotten the beginning.
    del training.arrivals[0][: 2 * LAYERS * 12 + 3]

    numbers = [each.number for each in training.compared().facts[labels_of(0)]]
    assert numbers == list(range(14, 40))


def test_steps_after_the_recorder_was_read_are_left_out() -> None:
    training = Training(2)
    training.step({1: {"backward": 8.0}}, 80)
    # It was read in backward of step 60, and training has gone on.
    for each in training.arrivals:
        del each[2 * LAYERS * 60 - 2 :]

    numbers = [each.number for each in training.compared().facts[labels_of(0)]]
    assert numbers == list(range(2, 60))


def test_steps_that_were_compared_before_are_not_compared_again() -> None:
    training = Training(2)
    training.step({1: {"backward": 8.0}}, 100)
    first = training.compared().facts[labels_of(0)]
    again = training.compared(first[-1].number)
    training.step({1: {"backward": 8.0}}, 7)
    more = training.compared(first[-1].number).facts[labels_of(0)]

    # As many as one sample has.
    assert [each.number for each in first] == list(range(40, 100))
    assert again == Comparison({}, NOTHING_NEW)
    assert [each.number for each in more] == list(range(100, 107))
    # A training that counts anew has lower numbers.
    assert training.compared(1_000_000).facts


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ({"took_ns": None}, NOT_TIMED),
        ({"op": "nccl:send 0->1"}, "ranks wait for each other in sends and receives"),
        # One of them may have waited for another node: late through no fault of its own.
        ({"group": "1"}, "a process group has only some of the ranks here"),
        (None, "a flight recorder of torch is empty: set TORCH_FR_BUFFER_SIZE=2000"),
    ],
)
def test_what_cannot_be_compared_is_told(what: dict[str, Any] | None, why: str) -> None:
    training = Training(2)
    training.step(steps=40)
    samples = training.samples()
    arrivals = [e._replace(**what) for e in training.arrivals[1]] if what else []
    samples[labels_of(1)] = Sample(arrivals, {"0": 2, "1": 4})

    facts, said = training.compared(samples=samples)

    assert facts == {}
    assert said.startswith(why)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("late", ["forward", "backward", ""])
def test_a_late_rank_is_named_after_two_samples_in_forward_or_backward(
    ranks: int, late: str
) -> None:
    training, stragglers = Training(ranks), Stragglers(every_step=False)
    for rank in training.ranks:
        stragglers.expect(labels_of(rank))
    named, last = [], -1
    for _ in range(3):
        training.step({1: {late: 8.0}} if late else {}, 60)
        for labels, facts in training.compared(last).facts.items():
            stragglers.feed(RankState(labels), Observation(facts=facts))
            last = facts[-1].number
        changes = stragglers.poll(0)
        named.append([(each.verdict.labels, each.verdict.phase) for each in changes])

    assert named == [[], [(labels_of(1), "compute")] if late else [], []]


def test_waits_for_ranks_of_other_nodes_make_no_difference_here() -> None:
    training = Training(2)
    training.step({1: {"backward": 8.0}}, 40)
    # All wait for somebody else for 10 ms more, in each collective.
    for each in training.arrivals:
        each[:] = [e._replace(took_ns=(e.took_ns or 0) + 10 * MS) for e in each]

    assert 27.5 <= training.work_ms(1, BACKWARD) <= 28.5
    assert 19.5 <= training.work_ms(0, BACKWARD) <= 20.5
