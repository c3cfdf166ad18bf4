"""A thread of the agent comes back after an error, and after a shortage of threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from otel_ddp import errors
from otel_ddp.agent.kept_thread import KeptThread
from shortages import no_threads

PATIENCE_S = 60.0


def test_a_thread_that_could_not_start_is_started_later() -> None:
    ran, end = threading.Event(), threading.Event()

    def work() -> None:
        ran.set()
        end.wait(PATIENCE_S)

    kept = KeptThread("metrics", work)
    with no_threads():
        kept.keep_running()
        problem = kept.problem
    kept.keep_running()

    assert problem.startswith("the thread metrics does not run: can't start new thread (ulimit -u")
    assert ran.wait(PATIENCE_S)
    assert kept.problem == ""
    end.set()
    assert kept.join(PATIENCE_S)


@pytest.mark.parametrize("error", [MemoryError, ValueError])
def test_a_thread_that_an_error_ended_is_started_again(
    error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    runs = 0

    def work() -> None:
        nonlocal runs
        runs += 1
        raise error

    kept = KeptThread("metrics", work)
    for _ in range(3):
        kept.keep_running()
        while kept.is_alive():
            pass

    assert runs == 3
    assert kept.problem == "the thread metrics does not run: an error ended it"
    assert [record.message for record in caplog.records] == [
        "the thread metrics failed; training goes on without it."
    ]
    assert kept.join(PATIENCE_S)
    assert kept.problem == ""


@pytest.fixture(autouse=True)
def forget_failures() -> Iterator[None]:
    yield
    errors.failures.pop("the thread metrics", None)
