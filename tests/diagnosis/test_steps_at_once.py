"""Steps that are read and added up many at a time: the same as word by word and one by one."""

from __future__ import annotations

import random
import struct

import pytest

from otel_ddp.agent.reading.steps import Parts, Step, StepStream
from otel_ddp.diagnosis.step_facts import batches_of, facts_of
from otel_ddp.journal import layout
from otel_ddp.journal.reader import Steps
from otel_ddp.vocabulary.words import PHASES, WORK_PHASES

CREATED = 1_700_000_000_000_000_000
MS = 1_000_000
OTHER, DATA, FORWARD = PHASES["other"], PHASES["data"], PHASES["forward"]


def record(offset: int, words: list[int]) -> Steps:
    return Steps(offset, struct.pack(f"<{len(words)}Q", *words), 0, False)


def story(chance: random.Random, disorder: bool) -> list[int]:
    """Words of some steps, with all that steps may have."""
    words, now = [], 0

    def say(code: int, value: int) -> None:
        words.append(code << layout.CODE_SHIFT | value)

    for number in range(chance.randrange(2, 12)):
        if number == 0 or chance.random() < 0.1:
            say(layout.STEPS_BEGAN, now)
        for _ in range(chance.randrange(8)):
            now += chance.choice((0, 1, 50)) if disorder else chance.randrange(1, 100)
            back = chance.choice((1, 40, 2 * 10**9)) if disorder and chance.random() < 0.05 else 0
            now = max(now - back, 0)
            say(chance.choice((*PHASES.values(), layout.OF_BUFFERS | PHASES["comm_wait"])), now)
        given = (*range(layout.STEP_NUMBER, layout.STEP_LOGGED + 1), 0xEE)
        for code in given:
            for _ in range(chance.choice((0, 0, 1, 1, 2))):
                say(code, chance.randrange(1, 1000))
        now += chance.choice((0, 0, 5))
        say(layout.STEP_ENDED, now)
    return words


@pytest.mark.parametrize("disorder", [False, True], ids=["in order", "in disorder"])
def test_steps_in_batches_are_what_they_are_one_by_one(disorder: bool) -> None:
    chance = random.Random(1)
    for _ in range(500):
        words = story(chance, disorder)
        at_once, bit_by_bit = StepStream(CREATED), StepStream(CREATED)

        found = at_once.feed(record(0, words))

        assert found == [
            step for at, word in enumerate(words) for step in bit_by_bit.feed(record(at, [word]))
        ]


def step(number: int, *parts: tuple[int, int], rest: tuple[tuple[int, int], ...] = ()) -> Step:
    spans_ns = [ms * MS for _, ms in parts]
    ended_ns = CREATED + sum(spans_ns) + sum(span_ns for _, span_ns in rest)
    codes = bytes([code for code, _ in parts])
    return Step(number, CREATED, ended_ns, Parts(CREATED, codes, spans_ns), rest, 0.0, False, 0)


def test_steps_of_several_kinds_stay_in_their_order_with_their_own_facts() -> None:
    steps = [
        step(1, (DATA, 1), (FORWARD, 2)),
        step(2, (DATA, 3), (FORWARD, 4)),
        step(3, (OTHER, 5), (DATA, 6), (OTHER, 7)),
        step(4, (DATA, 8), (FORWARD, 9)),
    ]

    facts = [each for run in batches_of(steps) for each in facts_of(run)]

    assert WORK_PHASES == ("data", "forward", "backward", "optimizer", "other")
    assert [(each.number, each.phases_ns) for each in facts] == [
        (1, (1 * MS, 2 * MS, 0, 0, 0)),
        (2, (3 * MS, 4 * MS, 0, 0, 0)),
        (3, (6 * MS, 0, 0, 0, 12 * MS)),
        (4, (8 * MS, 9 * MS, 0, 0, 0)),
    ]


def test_the_longest_stretch_of_a_phase_is_one_part_of_one_step_and_no_rest() -> None:
    waits = layout.OF_BUFFERS | FORWARD
    runs = batches_of(
        [
            step(1, (DATA, 1), (FORWARD, 2), (DATA, 4)),
            step(2, (DATA, 5), (FORWARD, 1), (DATA, 3)),
            step(3, (waits, 8), rest=((DATA, 100 * MS),)),
        ]
    )

    assert [run.longest_ns() for run in runs] == [
        {DATA: 5 * MS, FORWARD: 2 * MS},
        {FORWARD: 8 * MS},
    ]
