"""Logged values that are not finite any more: from the journal to the verdict."""

from __future__ import annotations

import math

import pytest

from golden import Golden
from make import labels_of
from otel_ddp.agent.reading.nonfinite import NonfiniteValues
from otel_ddp.diagnosis.detector import NonfiniteValue, Observation, RankState
from otel_ddp.diagnosis.nonfinite import Nonfinite
from otel_ddp.diagnosis.verdict import Change
from otel_ddp.journal.parser import Name, Scalars

S = 1_000_000_000
NOW = 1_700_000_000 * S
NAN, INF = math.nan, math.inf
NAMES = {1: Name("loss", "train"), 2: Name("grad_norm", "train")}


class Log:
    """What one process logs, and what is seen of it."""

    def __init__(self) -> None:
        self.values = NonfiniteValues()
        self.new: list[Scalars] = []
        self.step = 0
        self.now_ns = NOW

    def put(self, *values: float, name: str = "loss", every: int = 1) -> None:
        """One in so many steps."""
        for value in values:
            self.step += every
            number = {each.text: number for number, each in NAMES.items()}[name]
            self.new.append(Scalars(NOW + self.step, self.step, None, (number,), (value,), 0))

    def poll(self, later_s: float = 2.0, ended: bool = False) -> list[tuple[str, int | None]]:
        self.now_ns += int(later_s * S)
        self.values.feed(self.new, self.now_ns)
        self.new.clear()
        return [(odd.name, odd.step) for odd in self.values.find(NAMES, self.now_ns, ended)]


@pytest.fixture
def log() -> Log:
    return Log()


def test_the_first_value_that_is_not_finite_is_found_among_many(log: Log) -> None:
    log.put(0.5, 0.4)
    assert log.poll() == []

    log.put(0.3, NAN, 0.2, INF, NAN, NAN)

    # The one that went before was followed by a finite one.
    assert log.poll() == [("loss", 6)]
    log.put(NAN)
    assert log.poll() == [("loss", 6)]
    log.put(0.5)
    assert log.poll() == []


def test_one_infinite_norm_may_be_the_search_for_a_loss_scale(log: Log) -> None:
    log.put(1.0, INF, name="grad_norm")
    # Another name says nothing of it.
    log.put(0.5, 0.4)

    assert log.poll() == []
    log.put(1.0, INF, name="grad_norm")
    assert log.poll() == []
    log.put(INF, name="grad_norm")
    assert log.poll() == [("grad_norm", 6)]


def test_a_value_without_a_successor_counts_after_a_minute_or_at_the_end(log: Log) -> None:
    log.put(1.0, NAN)

    assert log.poll() == []
    assert log.poll(ended=True) == [("loss", 2)]
    assert log.poll(57.0) == []
    assert log.poll(2.0) == [("loss", 2)]


def test_what_was_never_finite_has_not_become_so(log: Log) -> None:
    log.put(INF, INF, INF)
    assert log.poll() == []

    log.put(0.5, INF, INF)
    assert log.poll() == [("loss", 5)]


def test_the_last_step_that_was_finite_is_known(log: Log) -> None:
    log.put(0.5, 0.4, every=5)
    log.poll()
    log.put(NAN, NAN, every=5)
    log.poll()

    (found,) = log.values.find(NAMES, log.now_ns)
    assert (found.finite_step, found.step) == (10, 15)


# --- The verdict ----------------------------------------------------------------------------------


def odd(
    step: int | None,
    name: str = "loss",
    value: float = NAN,
    time_ns: int = NOW,
    after: int | None = None,
) -> NonfiniteValue:
    """Not finite at this step, and finite at the one before, or at *after*."""
    if after is None and step is not None:
        after = step - 1
    return NonfiniteValue(name, "train", value, step, time_ns, after)


def found(values: Nonfinite, rank: int, odd_ones: list[NonfiniteValue]) -> None:
    values.feed(RankState(labels_of(rank)), Observation(nonfinite=odd_ones))


def summary(changes: list[Change]) -> list[tuple[str, int | None, bool]]:
    return [(each.verdict.evidence["rank"], each.verdict.step, each.opened) for each in changes]


def test_the_rank_that_was_first_is_named() -> None:
    values = Nonfinite()
    found(values, 0, [odd(151), odd(152, "grad_norm")])
    found(values, 1, [odd(150)])

    ((verdict, opened),) = values.poll(NOW)

    assert opened
    assert verdict.labels == (("group", "g"), ("run", "r"))
    assert (verdict.step, verdict.evidence["rank"], verdict.evidence["value"]) == (150, "1", "NaN")
    assert verdict.sentence.startswith(
        "loss became NaN at step 150 on rank 1 (n1). Since then also: grad_norm."
    )
    assert values.poll(NOW + S) == []


@pytest.mark.parametrize(
    ("of_0", "of_1"),
    [
        # Each rank's loss is read in some steps only. Rank 0 was finite after rank 1 was not.
        (odd(156, after=153), odd(153, after=148)),
        # In the step after it the gradients of all ranks are lost, and so are all losses.
        (odd(155, after=150), odd(155, after=148)),
        (odd(155), odd(154, after=150)),
        # Rank 0 shows the step, but rank 1 may have been first.
        (odd(152), odd(155, after=150)),
        (odd(7, value=-INF), odd(7, value=-INF)),
        # Without steps the clock decides.
        (odd(None, time_ns=NOW + 5), odd(None, time_ns=NOW)),
        # The mean of the gradients of all ranks.
        (odd(151, "grad_norm"), odd(151)),
    ],
    ids=["before", "overlap", "step before", "perhaps before", "same step", "clock", "gradients"],
)
def test_as_much_is_said_of_the_step_and_the_rank_as_is_known(
    of_0: NonfiniteValue, of_1: NonfiniteValue, golden: Golden
) -> None:
    values = Nonfinite()
    found(values, 0, [of_0])
    found(values, 1, [of_1])

    ((verdict, _),) = values.poll(NOW)

    golden.check(f"rank: {verdict.evidence['rank']}", verdict.sentence)


def test_it_is_one_incident_until_all_values_were_finite_for_a_minute() -> None:
    values = Nonfinite()
    found(values, 0, [odd(5)])
    changes = values.poll(NOW)
    found(values, 0, [])
    changes += values.poll(NOW + S)
    found(values, 0, [odd(9)])
    changes += values.poll(NOW + 50 * S)
    found(values, 0, [])
    for after_s in (60, 119):
        changes += values.poll(NOW + after_s * S)

    assert summary(changes) == [("0", 5, True)]
    assert summary(values.poll(NOW + 120 * S)) == [("0", 5, False)]
    assert values.poll(NOW + 200 * S) == []


def test_an_earlier_value_that_is_read_later_is_the_first() -> None:
    values = Nonfinite()
    found(values, 0, [odd(201)])
    changes = values.poll(NOW)
    found(values, 1, [odd(200)])
    changes += values.poll(NOW + S)
    found(values, 1, [])
    changes += values.poll(NOW + 2 * S)

    assert summary(changes) == [("0", 201, True), ("1", 200, True)]
