"""Whatever is given to log: no exception, the rest of the call recorded, one warning a place."""

from __future__ import annotations

import math
import signal
import sys
import threading
import tracemalloc
import warnings
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import otel_ddp
from conftest import Here, Journal
from odd_values import Rude
from otel_ddp import Run, errors
from otel_ddp.vocabulary import catalog


@pytest.fixture
def run(place: Here) -> Run:
    # Bad input is no failure of ours: `finished` sees that none was contained.
    errors.raise_failures = False
    return otel_ddp.init()


@pytest.fixture
def hurried() -> Iterator[None]:
    """Threads take turns far more often than they would."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def refused(journal: Journal, why: str = "") -> float:
    attributes = {"why": why} if why else {}
    return journal.total(catalog.OTEL_DDP_VALUES_REFUSED, **attributes)


def finished(place: Here) -> Journal:
    otel_ddp.finish()
    assert errors.failures == {}
    return place.only()


VALUES = {"None": None, "array": np.zeros(3), "rude": Rude(), "digits": -(10**5000)}


@pytest.mark.parametrize("given", VALUES)
def test_a_value_that_is_no_number_costs_itself_and_one_warning(
    given: str, run: Run, place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(3):
        run.log({"before": 1.0, "bad": VALUES[given], "after": 2.0}, step=step)

    journal = finished(place)
    assert journal.points == [("before", 1.0), ("after", 2.0)] * 3
    assert [call.step for call in journal.calls] == [0, 1, 2]
    assert 3 == refused(journal) == refused(journal, "value")
    (said,) = caplog.messages
    assert said.startswith("'bad' was not recorded: ")
    assert len(said) < 200


def test_each_place_is_warned_about_once_and_not_for_ever(
    run: Run, place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        run.log({f"bad{number}": None for number in range(200)})

    assert refused(finished(place)) == 400
    assert 50 == len(caplog.messages) == len(set(caplog.messages))


NAMES: dict[str, tuple[Any, str | None]] = {
    "number": (3, "3"),
    "newline and quotes": ('a\n"b"\'', 'a\n"b"\''),
    "surrogate": ("a\ud800", "a?"),
    "None": (None, None),
    "empty": ("", None),
    "tuple": (("a", 1), None),
    "rude": (Rude(), None),
}


@pytest.mark.parametrize("given", NAMES)
def test_a_name_is_converted_or_refused(
    given: str, run: Run, place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    name, expected = NAMES[given]

    for _ in range(3):
        run.log({"before": 1.0, name: 0.5, "after": 2.0})

    journal = finished(place)
    bad = [] if expected is None else [(expected, 0.5)]
    assert [("before", 1.0), *bad, ("after", 2.0)] * 3 == journal.points
    assert (1 if expected is None else 0) == len(caplog.messages)
    assert (3 if expected is None else 0) == refused(journal) == refused(journal, "name")


def test_a_name_of_a_megabyte_is_shortened_and_stays_distinct(run: Run, place: Here) -> None:
    for _ in range(2):
        run.log({"n" * 2**20 + "1": 1.0, "n" * 2**20 + "2": 2.0})

    journal = finished(place)
    names = {name for name, _ in journal.points}
    assert ({200}, 2) == ({len(name) for name in names}, len(names))
    assert [value for _, value in journal.points] == [1.0, 2.0] * 2
    assert refused(journal) == 0


def test_more_values_than_a_record_holds_become_several(run: Run, place: Here) -> None:
    texts, numbers = {str(n): n + 0.5 for n in range(700)}, {n: n + 1.0 for n in range(700)}
    run.log({**texts, **numbers})  # type: ignore[dict-item]

    journal = finished(place)
    assert [len(call.values) for call in journal.calls] == [1000, 400]
    assert sorted(journal.points) == sorted(
        (str(name), value) for name, value in [*texts.items(), *numbers.items()]
    )


@pytest.mark.parametrize(
    "step",
    [True, 1.0, np.int64(1), np.float32(1), np.array([1]), np.int64(2**60 + 1)],
    ids=repr,
)
def test_a_step_that_means_a_whole_number_is_accepted(step: Any, run: Run, place: Here) -> None:
    for _ in range(2):
        run.log({"loss": 0.5}, step=step)

    journal = finished(place)
    assert [call.step for call in journal.calls] == [int(np.ravel(step)[0])] * 2
    assert refused(journal) == 0


WRONG: list[tuple[str, Any]] = [
    *(("step", each) for each in (-1, 1.5, "3", 2**63, math.nan, Rude(), np.zeros(2))),
    *(("epoch", each) for each in ("one", Rude(), math.inf, 2**2000, 1j)),
    *(("split", each) for each in ("", 1j, ["val"], Rude(), b"val")),
]


@pytest.mark.parametrize(
    ("what", "wrong"), WRONG, ids=[f"{what} {type(each).__name__}" for what, each in WRONG]
)
def test_what_is_no_step_epoch_or_split_costs_only_itself(
    what: str, wrong: Any, run: Run, place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    good: dict[str, Any] = {"step": 1, "epoch": 1.5, "split": "val"}

    run.log({"loss": 0.5}, **good)
    for _ in range(2):
        run.log({"loss": 0.25}, **{**good, what: wrong})

    journal = finished(place)
    assert journal.points == [("loss", 0.5), ("loss", 0.25), ("loss", 0.25)]
    found = [(call.step, call.epoch) for call in journal.calls]
    splits = [name.split for name, _, _ in journal.logged]
    without = {"step": None, "epoch": None, "split": "train"}[what]
    left = {**good, what: without}
    assert found == [(1, 1.5), *[(left["step"], left["epoch"])] * 2]
    assert splits == ["val", *[left["split"]] * 2]
    assert refused(journal) == 2
    (said,) = caplog.messages
    assert what != "step" or "a whole number from 0 on was expected, got " in said


@pytest.mark.parametrize(
    "metrics",
    # The last one is endless.
    [None, "loss", [("loss", 0.5)], Rude(), iter(int, 1)],
    ids=lambda metrics: type(metrics).__name__,
)
def test_what_is_no_mapping_is_refused(
    metrics: Any, run: Run, place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        run.log(metrics, step=1)
    run.log({"loss": 0.5})

    journal = finished(place)
    assert journal.points == [("loss", 0.5)]
    assert refused(journal) == 2
    (said,) = caplog.messages
    expected = f"log expects a mapping of names to numbers, got {type(metrics).__name__}."
    assert expected == said


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict, lambda d: defaultdict(float, d)])
def test_every_kind_of_mapping_is_accepted(kind: Any, run: Run, place: Here) -> None:
    for _ in range(3):
        run.log(kind({"a": 1.0, "b": 2.0}))

    assert finished(place).points == [("a", 1.0), ("b", 2.0)] * 3


def test_values_that_are_not_finite_are_recorded_and_counted(run: Run, place: Here) -> None:
    for _ in range(2):
        run.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": -0.0}, split="val")

    journal = finished(place)
    assert [str(value) for _, value in journal.points] == ["nan", "inf", "-inf", "-0.0"] * 2
    for name in "abc":
        assert journal.total(catalog.TRAINING_NONFINITE, name=name, split="val") == 2
    assert journal.total(catalog.TRAINING_NONFINITE) == 6


def test_a_sum_beyond_floats_is_no_value_beyond_floats(run: Run, place: Here) -> None:
    for _ in range(3):
        run.log({"a": 1.7e308, "b": 1.7e308, "c": 2**1000})

    journal = finished(place)
    assert journal.points == [("a", 1.7e308), ("b", 1.7e308), ("c", 2.0**1000)] * 3
    assert journal.total(catalog.TRAINING_NONFINITE) == 0


def test_scalars_of_numpy_and_tensors_of_the_cpu_give_equal_results_and_no_warning(
    run: Run, place: Here
) -> None:
    torch = pytest.importorskip("torch")
    kinds: dict[str, Any] = {
        "float32": torch.tensor(0.1),
        "bfloat16": torch.tensor(0.1, dtype=torch.bfloat16),
        "int64": torch.tensor(2**62 + 1),
        "bool": torch.tensor(True),
        "grad": torch.tensor(0.3, requires_grad=True) * 2.0,
        "epoch": torch.tensor(3.0, requires_grad=True),
        "numpy": np.finfo(np.float32).max,
    }
    expected = [(name, float(value.item())) for name, value in kinds.items()] + [("plain", 0.1)]
    kinds["plain"] = 0.1

    # An error would only send the call the slow way.
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            run.log({name: kinds[name] for name in kinds if name != "numpy"})
            run.log(kinds)
        # What is no such scalar is refused, or recorded, as at first.
        run.log({**kinds, "float32": torch.tensor([0.5]), "grad": torch.tensor(1j)})

    journal = finished(place)
    assert [str(each.message) for each in said] == []
    assert journal.points[-7:] == [("float32", 0.5), *expected[1:4], *expected[5:]]
    without = [each for each in expected if each[0] != "numpy"]
    assert journal.points[:-7] == [*without, *expected] * 3
    assert [call.epoch for call in journal.calls] == [3.0] * 7


def test_a_log_function_that_was_kept_records_nothing_once_its_run_is_over(place: Here) -> None:
    first = otel_ddp.init(run="first")
    first.log({"loss": 1.0})
    log = first.log
    log({"loss": 2.0})
    first.finish()
    second = otel_ddp.init(run="second")

    log({"loss": 3.0})
    second.log({"loss": 4.0})
    second.finish()

    found = {each.identity["run"]: each.points for each in place.read()}
    assert found == {"first": [("loss", 1.0), ("loss", 2.0)], "second": [("loss", 4.0)]}


def test_ever_new_names_are_capped_counted_and_bounded(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    run = otel_ddp.init()
    run.log({"loss": 1.0}, step=0)
    tracemalloc.start()
    try:
        for start in range(0, 20_000, 1000):
            run.log({f"name{number}": 1.0 for number in range(start, start + 1000)}, step=1)
            run.log({"loss": 2.0}, step=1)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    journal = finished(place)
    assert len(journal.names) == 1000
    assert refused(journal, "names_full") == 20_000 - 999
    assert sum(name == "loss" for name, _ in journal.points) == 21
    assert sum(name != "loss" for name, _ in journal.points) == 999
    (said,) = caplog.messages
    assert "this process has logged 1000 different ones, the most." in said
    assert grown < 2e6


@pytest.mark.parametrize("long", [pytest.param(False, marks=pytest.mark.stress), True])
def test_key_sets_that_always_change_do_not_fill_the_memory(long: bool, place: Here) -> None:
    run = otel_ddp.init()
    names = [f"{number:03}" for number in range(300)]
    tracemalloc.start()
    try:
        for call in range(150 if long else 8000):
            chosen = [names[call % 140], names[140 + call // 140 % 140], *names[290:]]
            # A long one is a text of its own each time, cut to the same name as before.
            tail = "x" * 2**16 if long else ""
            run.log({name + tail: 1.0 for name in chosen}, step=call)
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert grown < 8e6
    assert len(finished(place).names) <= 300


@pytest.mark.usefixtures("hurried")
def test_threads_that_log_at_once_lose_nothing(place: Here) -> None:
    start = threading.Barrier(8)
    with otel_ddp.init() as run:

        def work(number: int) -> None:
            start.wait()
            for step in range(2000):
                run.log({f"of{number}": float(step), "all": 1.0}, step=step)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    journal = place.only()
    assert (journal.lost, journal.unreadable) == (0, 0)
    for number in range(8):
        name = f"of{number}"
        assert list(range(2000)) == [value for found, value in journal.points if found == name]
    assert len(journal.names) == 9, "a name that two threads meet first is one name"


@pytest.mark.parametrize("name", ["loss", "new"])
def test_a_call_of_a_handler_that_interrupts_a_write_is_counted(name: str, place: Here) -> None:
    run = otel_ddp.init()
    run.log({"loss": 1.0})
    recorder = run._records.recorder
    assert recorder is not None

    before = signal.signal(signal.SIGUSR1, lambda *_: run.log({name: 3.0}))
    try:
        recorder.gate.write(lambda: signal.raise_signal(signal.SIGUSR1), None)
    finally:
        signal.signal(signal.SIGUSR1, before)
    run.log({"loss": 2.0})

    journal = finished(place)
    assert journal.points == [("loss", 1.0), ("loss", 2.0)]
    assert refused(journal, "reentered") == 1


def test_a_call_of_a_thread_after_the_end_records_nothing(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    run = otel_ddp.init()
    run.log({"loss": 1.0})
    # As a thread holds it that was held up on its way.
    recorder = run._records.recorder
    assert recorder is not None
    run.finish()

    recorder.log({"loss": 2.0})
    recorder.log({"new": 2.0})
    recorder.documents.append(17, {"name": "late"})
    recorder.poll_copies()

    assert caplog.messages == []
    assert finished(place).points == [("loss", 1.0)]
