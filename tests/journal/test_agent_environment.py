"""When two processes mean the same agent."""

from __future__ import annotations

import pytest

from otel_ddp.journal import place


def test_an_agent_that_sends_is_another_one_than_one_that_does_not() -> None:
    assert place.agent_digest({}, offline=True) != place.agent_digest({}, offline=False)


@pytest.mark.parametrize(
    "variable",
    ["OTEL_DDP_NOTIFY", "OTEL_DDP_SCRAPE_TOKEN_FILE"],
)
def test_another_value_of_what_an_agent_goes_by_calls_for_another_agent(variable: str) -> None:
    without, one, other = (
        place.agent_digest({variable: text} if text else {}, offline=False)
        for text in ("", "https://a.example", "https://b.example")
    )

    assert len({without, one, other}) == 3
