"""Facts of many steps at once."""

from __future__ import annotations

from otel_ddp.agent.reading.steps import Parts, Step
from otel_ddp.diagnosis.step_facts import batches_of, facts_of
from otel_ddp.journal import layout
from otel_ddp.vocabulary.words import PHASES, WORK_PHASES

CREATED = 1_700_000_000_000_000_000
MS = 1_000_000
OTHER, DATA, FORWARD = PHASES["other"], PHASES["data"], PHASES["forward"]


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
