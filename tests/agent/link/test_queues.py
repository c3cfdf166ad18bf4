"""What waits on either end of a link, and how far two clocks are apart."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from otel_ddp.agent.link.client import ClockOffset
from otel_ddp.agent.link.server import WaitingReports

S = 1_000_000_000


def test_where_reports_wait_too_long_the_oldest_are_dropped() -> None:
    waiting = WaitingReports(most_bytes=10)

    for node, text in (("a", "1"), ("b", "2"), ("a", "3"), ("b", "4")):
        waiting.add(node, text, 4)

    assert waiting.take() == [("a", "3"), ("b", "4")]
    assert not waiting.take()


DELAYS = st.integers(0, 30_000_000)


@settings(deadline=None, database=None, derandomize=True)
@given(
    st.integers(-10 * S, 10 * S),
    st.integers(-10 * S, 10 * S),
    st.lists(st.tuples(DELAYS, DELAYS, DELAYS), min_size=1, max_size=80),
    st.lists(st.tuples(DELAYS, DELAYS, DELAYS), min_size=1, max_size=80),
)
def test_the_offset_is_right_within_its_uncertainty_also_after_a_clock_was_set(
    offset_ns: int,
    later_offset_ns: int,
    exchanges: list[tuple[int, int, int]],
    later: list[tuple[int, int, int]],
) -> None:
    clock, now = ClockOffset(), 1_000 * S
    for true_ns, each in [(offset_ns, exchanges), (later_offset_ns, later)]:
        for there, in_between, back in each:
            arrived, left = now + there, now + there + in_between
            clock.add(now, arrived + true_ns, left + true_ns, left + back)
            now += S

        assert clock.ns is not None
        # A small step may hide in what messages need, until they need less.
        worst = max(sum(one) for one in (*exchanges, *later)) + 10_000_000
        assert abs(clock.ns - true_ns) <= max(clock.uncertainty_ns, worst)


def test_of_many_exchanges_the_quickest_counts() -> None:
    clock = ClockOffset()

    clock.add(0, 50 + 400, 50 + 401, 101)
    clock.add(1000, 1005 + 400, 1006 + 400, 1011)
    clock.add(2000, 2070 + 400, 2070 + 400, 2080)

    assert clock.ns == 400
    assert clock.uncertainty_ns == 5
    # It drifts since then.
    clock.add(30 * S, 30 * S + 500, 30 * S + 500, 30 * S + 1000)
    assert clock.uncertainty_ns == 5 + 2_999_999


def test_an_exchange_in_which_a_clock_was_set_back_or_that_a_lead_invents_counts_as_none() -> None:
    clock = ClockOffset()

    clock.add(1000, 1500, 1400, 1010)
    clock.add(1000, 1500, 1501, 990)
    clock.add(1000, 2**63 - 2, 2**63 - 1, 1010)

    assert clock.ns is None
