"""What all integrations share: their arguments, and phases between two events."""

from __future__ import annotations

import pytest

import otel_ddp
from conftest import Here
from otel_ddp.integrations import OpenPhase, checked


def test_an_argument_that_instrument_does_not_take_raises_where_it_is_given() -> None:
    assert checked({"group": "one", "strategy": "all"}) == {"group": "one", "strategy": "all"}
    with pytest.raises(TypeError, match="grup"):
        checked({"grup": "one"})


def test_a_phase_ends_when_the_next_one_begins(place: Here) -> None:
    run = otel_ddp.init()
    phase = OpenPhase()

    phase.begin("eval")
    phase.begin("checkpoint")
    during = place.only().phase
    phase.end()
    phase.end()
    run.finish()

    assert during == "checkpoint"
    assert place.only().span_names == ["eval", "checkpoint"]
    assert place.only().phase == "other"
