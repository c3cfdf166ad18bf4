"""What torch's allocator counts, and what is left out where it does not count."""

from __future__ import annotations

import signal
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from otel_ddp.torch.readings.devices import Allocator, Reading  # noqa: E402

CUDA = torch.device("cuda", 1)


def statistics() -> dict[str, Any]:
    """A part of what torch has, with numbers that cannot be mistaken for one another."""

    def pools(first: int) -> dict[str, dict[str, int]]:
        return {
            pool: {what: first + number for number, what in enumerate(("current", "peak", "freed"))}
            for pool, first in (("all", first), ("large_pool", first + 10))
        }

    return {
        "allocated_bytes": pools(100),
        "reserved_bytes": pools(200),
        "active_bytes": pools(300),
        "num_alloc_retries": 4,
        "num_ooms": 5,
    }


class FakeModule:
    """What torch.cuda offers."""

    def __init__(self) -> None:
        self.found: Any = statistics()
        self.asked: list[Any] = []
        self.initialized = True
        self.backend = "native"

    def is_initialized(self) -> bool:
        return self.initialized

    def memory_stats_as_nested_dict(self, device: Any) -> Any:
        assert self.initialized, "this would have made a context"
        self.asked.append(device)
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def get_allocator_backend(self) -> str:
        return self.backend


@pytest.fixture
def module() -> FakeModule:
    return FakeModule()


def read(module: Any) -> Reading | None:
    return Allocator(CUDA, module=lambda _: module).read()


def test_one_question_gives_all_the_numbers(module: FakeModule) -> None:
    assert read(module) == Reading(allocated=100, reserved=200, peak=101, retries=4, ooms=5)
    assert module.asked == [CUDA]


def test_a_device_that_is_not_in_use_is_not_touched(module: FakeModule) -> None:
    module.initialized = False

    assert read(module) is None


def test_the_real_module_is_not_initialised_by_reading() -> None:
    assert not torch.cuda.is_initialized()
    assert Allocator(torch.device("cuda", 0)).read() is None
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("kind", ["cpu", "meta", "mps"])
def test_devices_without_such_an_allocator_have_no_reading(kind: str) -> None:
    assert Allocator(torch.device(kind)).read() is None


@pytest.mark.parametrize(
    ("missing", "field"),
    [
        ("reserved_bytes", "reserved"),
        ("num_alloc_retries", "retries"),
        ("num_ooms", "ooms"),
    ],
)
def test_what_the_allocator_does_not_count_is_absent_and_never_0(
    module: FakeModule, missing: str, field: str
) -> None:
    whole = read(module)
    del module.found[missing]

    assert whole is not None
    assert read(module) == whole._replace(**{field: None})


def test_a_statistic_of_another_shape_is_absent(module: FakeModule) -> None:
    module.found = {"allocated_bytes": {"all": 7}, "reserved_bytes": {}, "num_ooms": "many"}

    assert read(module) == Reading(None, None, None, None, None)


def test_an_allocator_that_never_counts_has_no_counts(module: FakeModule) -> None:
    module.backend = "cudaMallocAsync"
    module.found.update(num_alloc_retries=0, num_ooms=0)

    assert read(module) == Reading(allocated=100, reserved=200, peak=101, retries=None, ooms=None)


@pytest.mark.parametrize("answer", [{}, RuntimeError("does not yet support getDeviceStats")])
def test_an_allocator_that_tells_nothing_has_no_reading(module: FakeModule, answer: Any) -> None:
    module.found = answer

    assert read(module) is None


def test_what_a_handler_raises_in_the_middle_is_no_answer(module: FakeModule) -> None:
    class WorkerDied(RuntimeError):
        pass

    def handle(*_: Any) -> None:
        raise WorkerDied

    def interrupted() -> str:
        signal.raise_signal(signal.SIGUSR1)
        return "native"

    module.get_allocator_backend = interrupted  # type: ignore[method-assign]
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(WorkerDied):
            read(module)
    finally:
        signal.signal(signal.SIGUSR1, before)
