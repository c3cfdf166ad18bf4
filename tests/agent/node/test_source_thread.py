"""A source that is read in a thread of its own: its pace, its failures, and what hangs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from make import Clock
from otel_ddp import errors
from otel_ddp.agent.node.source import Sampler

PATIENCE_S = 300.0


class Pauses(threading.Event):
    """The event that a sampler sleeps on: the test sees each sleep, and ends it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[float | None] = []
        self._asleep, self._on = threading.Semaphore(0), threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.asked.append(timeout)
        self._asleep.release()
        self._on.acquire()
        return self.is_set()

    def set(self) -> None:
        super().set()
        self._on.release()

    def reached(self) -> None:
        assert self._asleep.acquire(timeout=PATIENCE_S)

    def next_one(self) -> None:
        self._on.release()
        self.reached()


class Bench:
    """A sampler that reads once a second, and its clocks."""

    def __init__(self) -> None:
        self.clock, self.pauses, self.go_on = Clock(500.0), Pauses(), threading.Event()
        self.read: Callable[[], Any] = lambda: "a value"
        self.sampler = Sampler(
            "made-up source",
            lambda: self.read(),
            1.0,
            clock=self.clock,
            wall_ns=lambda: int(self.clock.now * 1e9) + 7,
            stopping=self.pauses,
        )

    def starts(self, read: Callable[[], Any]) -> Sampler:
        self.read = read
        self.sampler.thread.keep_running()
        return self.sampler


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.go_on.set()
    assert made.sampler.stop(PATIENCE_S)


def test_a_sample_has_the_time_at_which_its_reading_began(bench: Bench) -> None:
    def read() -> str:
        bench.clock.now += 0.25
        return "a value"

    assert bench.sampler.fresh() is None
    sampler = bench.starts(read)
    bench.pauses.reached()
    bench.clock.now += 3.0

    assert sampler.fresh() is None
    bench.clock.now -= 0.25
    assert sampler.fresh() == ("a value", 500_000_000_007)
    assert sampler.age_s() == 2.75


def test_readings_begin_a_period_apart_and_late_ones_are_not_caught_up(bench: Bench) -> None:
    takes_s = iter([0.25, 1.0, 7.5, 0.0])

    def read() -> None:
        bench.clock.now += next(takes_s)

    bench.starts(read)
    bench.pauses.reached()
    for _ in range(3):
        bench.pauses.next_one()

    assert bench.pauses.asked == [0.75, 1.0, 1.0, 1.0]


def test_an_error_is_counted_and_the_last_value_stays_and_grows_old(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes: Iterator[Any] = iter(["good", RuntimeError("a"), RuntimeError("b"), "good again"])

    def read() -> Any:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    sampler = bench.starts(read)
    bench.pauses.reached()
    for _ in range(2):
        bench.clock.now += 1.0
        bench.pauses.next_one()

    assert sampler.fresh() == ("good", 500_000_000_007)
    assert sampler.age_s() == 2.0
    assert errors.failures == {"reading the made-up source": 2}
    assert len(caplog.records) == 1

    bench.pauses.next_one()
    assert sampler.fresh() == ("good again", 502_000_000_007)
    assert sampler.age_s() == 0.0


def test_a_reading_that_hangs_blocks_no_caller_and_its_age_grows(bench: Bench) -> None:
    inside = threading.Event()

    def hang() -> None:
        inside.set()
        bench.go_on.wait()

    sampler = bench.starts(hang)
    assert inside.wait(PATIENCE_S)
    bench.clock.now += 20.0

    # Counted from the start, since none has come to its end.
    assert sampler.age_s() == 20.0
    assert sampler.hangs()
    assert sampler.fresh() is None
    assert sampler.stop(0.0) is False
