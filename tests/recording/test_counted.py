"""Steps that are only counted, until one comes at whose end there is something to decide."""

from __future__ import annotations

import weakref

from otel_ddp.recording.steps import CountedSteps


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
