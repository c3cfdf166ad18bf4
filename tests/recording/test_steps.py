"""Steps that are only counted, and their totals, which only grow."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

from otel_ddp.recording.steps import CountedSteps, Work
from otel_ddp.recording.totals import StepTotals


class Optimizer:
    """Counted by itself, and not by the id that it had."""


def test_steps_of_the_one_optimizer_are_counted_while_it_is_there() -> None:
    counted, optimizer = CountedSteps(lambda: 1000), Optimizer()
    counted.begin(8, weakref.ref(optimizer), 10)
    had = id(optimizer)

    assert [counted.counts(optimizer), counted.counts(Optimizer())] == [True, False]

    del optimizer
    # Python gives its id to one of those that come next.
    others = [Optimizer() for _ in range(1000)]
    assert had in map(id, others)
    assert not any(map(counted.counts, others))
    assert len(counted.ends) == 1


# A counter that falls looks as if its process had restarted.
def test_a_thread_that_counted_before_the_last_step_takes_nothing_away() -> None:
    written = memoryview(bytearray(8 * 8)).cast("d")
    places: dict[str, int] = {}
    of_process: Any = SimpleNamespace(
        place=lambda metric, **_: places.setdefault(metric.name, len(places))
    )
    writer: Any = SimpleNamespace(totals=written)
    totals = StepTotals(of_process, writer)
    totals.steps = 2

    totals.count(work(20, 40, micro_batches=2))
    totals.count(work(10, 20, micro_batches=1))

    assert written[:5].tolist() == [2.0, 20.0, 40.0, 2.0, 8.0]


def work(samples: int, tokens: int, micro_batches: int) -> Work:
    made = Work()
    made.micro_batches = micro_batches
    made.samples, made.tokens, made.flops, made.flops_method = samples, tokens, 8.0, "6pt"
    return made
