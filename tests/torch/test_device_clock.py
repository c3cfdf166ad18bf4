"""The clock of the device, on a fake device that is as fast as the test wants it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from otel_ddp import catalog  # noqa: E402
from otel_ddp.torch.device_clock import DeviceClock, clock_for  # noqa: E402

OTHER, DATA, FORWARD, BACKWARD, WAIT, OPTIMIZER = (
    catalog.PHASES[name]
    for name in ("other", "data", "forward", "backward", "comm_wait", "optimizer")
)
# A step: how many milliseconds the device works on each phase.
STEP = {OTHER: 1, DATA: 2, FORWARD: 8, BACKWARD: 16, WAIT: 4, OPTIMIZER: 32}
STEP_S = sum(STEP.values()) / 1000


class FakeDevice:
    """What torch.cuda offers; the device does what it was given when the test says so."""

    def __init__(self) -> None:
        self.now_ms = 0.0  # when the device will have done all it was given up to now
        self.late = False  # whether it is still busy with all of it
        self.capturing = False
        self.broken = ""  # the one call that fails
        self.interrupted = ""  # the one call in which a signal comes
        self.made = 0
        self.streams: list[Any] = []
        self.waiting: list[Any] = []
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing
                device.made += 1

            def record(self, stream: Any) -> None:
                assert not device.capturing, "the graph would record it again and again"
                device.fails("record")
                device.streams.append(stream)
                self.at_ms = device.now_ms
                self.passed = not device.late
                if device.late:
                    device.waiting.append(self)

            def query(self) -> bool:
                assert not device.capturing, "a query spoils the graph"
                device.fails("query")
                return self.passed

            def elapsed_time(self, end: Any) -> float:
                device.fails("elapsed_time")
                if not (self.passed and end.passed):
                    raise RuntimeError("Both events must be completed")
                return float(end.at_ms - self.at_ms)

            def synchronize(self) -> None:
                raise AssertionError("this would have waited for the device")

        self.Event = Event

    def fails(self, call: str) -> None:
        if self.interrupted == call:
            self.interrupted = ""
            signal.raise_signal(signal.SIGUSR1)
        if self.broken == call:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def catch_up(self) -> None:
        self.late = False
        for event in self.waiting:
            event.passed = True

    def current_stream(self, index: Any) -> str:
        return f"the stream of {index}"

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def synchronize(self, *_: Any) -> None:
        raise AssertionError("this would have waited for the device")


class Book:
    """What was charged."""

    def __init__(self) -> None:
        self.charges: list[tuple[int, float]] = []

    def __call__(self, code: int, seconds: float) -> None:
        self.charges.append((code, seconds))

    def spent(self) -> dict[int, float]:
        spent: dict[int, float] = {}
        for code, seconds in self.charges:
            spent[code] = spent.get(code, 0.0) + seconds
        return spent

    def all(self) -> float:
        return sum(seconds for _, seconds in self.charges)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def book() -> Book:
    return Book()


@pytest.fixture
def clock(device: FakeDevice, book: Book) -> DeviceClock:
    return DeviceClock(torch.device("cuda", 3), module=device, charge=book)


def work(device: FakeDevice, clock: DeviceClock, code: int, took_ms: float) -> None:
    clock.mark(code)
    device.now_ms += took_ms


def step(device: FakeDevice, clock: DeviceClock, times: int = 1) -> None:
    for _ in range(times):
        for code, took_ms in STEP.items():
            work(device, clock, code, took_ms)
        clock.step_finished()


def test_the_phases_are_charged_in_order_and_add_up(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    step(device, clock, 5)

    # Three of five are two steps old; the last phase of the third ends with a mark of the fourth.
    once = [(code, took_ms / 1000) for code, took_ms in STEP.items()]
    assert book.charges == (3 * once)[:-1]
    assert book.all() == pytest.approx(3 * STEP_S - STEP[OPTIMIZER] / 1000)


def test_events_are_recorded_on_the_current_stream_of_its_device(
    device: FakeDevice, clock: DeviceClock
) -> None:
    step(device, clock)

    assert device.streams == ["the stream of 3"] * len(STEP)


def test_a_step_is_charged_two_steps_later(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    step(device, clock, 2)
    assert book.charges == []

    step(device, clock)
    assert book.all() == pytest.approx(STEP_S - STEP[OPTIMIZER] / 1000)

    step(device, clock)
    assert book.all() == pytest.approx(2 * STEP_S - STEP[OPTIMIZER] / 1000)


def test_what_the_device_has_not_done_is_charged_later_and_whole(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    device.late = True
    step(device, clock, 10)
    assert book.charges == []

    device.catch_up()
    step(device, clock)

    assert book.all() == pytest.approx(9 * STEP_S - STEP[OPTIMIZER] / 1000)
    assert clock.dropped == 0


def test_a_stream_that_is_behind_is_not_mistaken_for_a_failure(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    """The last event of a step may be done before those of another stream."""
    device.late = True
    work(device, clock, FORWARD, 8)
    device.late = False
    work(device, clock, BACKWARD, 16)
    clock.step_finished()
    step(device, clock, 3)

    assert book.charges == []
    assert not clock.failed


def test_a_stream_that_was_ahead_takes_no_time_from_other_phases(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    work(device, clock, FORWARD, 8)
    began = device.now_ms
    work(device, clock, BACKWARD, -3)
    work(device, clock, OPTIMIZER, 0)
    clock.step_finished()
    device.now_ms = began + 5
    step(device, clock, 3)

    assert book.charges[:2] == [(FORWARD, 0.008), (OPTIMIZER, 0.005)]


def test_a_step_in_which_a_graph_is_captured_is_dropped_whole(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    step(device, clock)
    work(device, clock, FORWARD, 100)
    device.capturing = True
    work(device, clock, BACKWARD, 1000)
    device.capturing = False
    work(device, clock, OPTIMIZER, 10_000)
    clock.step_finished()
    step(device, clock, 3)

    # The first step and the third; the time between them is unknown.
    last = STEP[OPTIMIZER] / 1000
    assert book.all() == pytest.approx(2 * (STEP_S - last))
    assert clock.dropped == 1


def test_a_step_that_ends_in_a_capture_asks_for_no_event(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    step(device, clock, 2)
    device.capturing = True
    step(device, clock, 5)
    device.capturing = False
    step(device, clock, 4)

    assert clock.dropped == 5
    assert book.all() == pytest.approx(4 * STEP_S - 2 * STEP[OPTIMIZER] / 1000)


@pytest.mark.parametrize("marks", [6, 60])
def test_a_device_that_stays_behind_costs_steps_and_no_memory(
    device: FakeDevice, clock: DeviceClock, book: Book, marks: int
) -> None:
    device.late = True
    for _ in range(1000):
        for _ in range(marks):
            work(device, clock, FORWARD, 1)
        clock.step_finished()

    assert clock.dropped == 1000 - 64
    assert device.made <= 65 * marks
    assert book.charges == []

    device.late = False
    step(device, clock, 200)
    assert book.all() == pytest.approx(198 * STEP_S - STEP[OPTIMIZER] / 1000)
    assert clock.dropped == 1000


def test_the_time_of_steps_that_were_dropped_is_charged_to_no_phase(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    step(device, clock, 5)
    device.late = True
    step(device, clock, 100)
    device.catch_up()
    step(device, clock, 3)

    # All but the last two of 108, in two stretches with a gap between them.
    told = 106 - clock.dropped
    assert clock.dropped == 100 + 1 - 64
    assert book.all() == pytest.approx(told * STEP_S - 2 * STEP[OPTIMIZER] / 1000)


def test_the_number_of_events_is_bounded(device: FakeDevice, clock: DeviceClock) -> None:
    """Marks of other threads than the training's do not close a part of a step."""

    def backward() -> None:
        for _ in range(1000):
            work(device, clock, BACKWARD, 1)

    device.late = True
    for _ in range(20):
        elsewhere(backward)
        clock.step_finished()

    assert clock.dropped == 16
    assert device.made <= 4096 + 1000


def test_a_step_of_thousands_of_micro_batches_is_charged_while_it_lasts(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    for _ in range(10_000):
        work(device, clock, FORWARD, 1)
        work(device, clock, BACKWARD, 2)
    told = book.all()
    clock.step_finished()

    assert told == pytest.approx(30.0, rel=0.01)
    assert device.made < 4 * 64
    assert clock.dropped == 0


def test_a_backward_that_never_ends_in_another_thread_is_given_up(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    def backward() -> None:
        for _ in range(20_000):
            work(device, clock, BACKWARD, 1)

    elsewhere(backward)
    assert device.made == 4096
    assert book.charges == []

    clock.step_finished()
    step(device, clock, 4)
    assert clock.dropped == 1
    assert book.all() == pytest.approx(2 * STEP_S - STEP[OPTIMIZER] / 1000)


def test_events_are_used_again(device: FakeDevice, clock: DeviceClock, book: Book) -> None:
    step(device, clock, 10)
    made = device.made
    step(device, clock, 10_000)

    assert device.made == made <= 4 * len(STEP)
    assert book.all() == pytest.approx(10_008 * STEP_S - STEP[OPTIMIZER] / 1000)


def test_captures_cost_no_events(device: FakeDevice, clock: DeviceClock) -> None:
    for _ in range(1000):
        for capturing in (False, True):
            device.capturing = capturing
            clock.mark(FORWARD)
        device.capturing = False
        clock.step_finished()

    assert clock.dropped == 1000
    assert device.made == 1


@pytest.mark.parametrize("call", ["record", "query", "elapsed_time"])
def test_a_device_that_fails_is_left_alone_for_good(
    device: FakeDevice, clock: DeviceClock, book: Book, call: str
) -> None:
    step(device, clock, 4)
    told = list(book.charges)

    device.broken = call
    step(device, clock)
    device.broken = ""
    recorded = len(device.streams)
    step(device, clock, 5)

    assert clock.failed
    assert book.charges == told
    assert len(device.streams) == recorded
    assert held(clock) == 0


class WorkerDied(RuntimeError):
    """As torch raises it in its own handler, when a worker of a data loader is killed."""


def handle(*_: Any) -> None:
    raise WorkerDied


@pytest.fixture
def handled() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, handle)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("handled")
@pytest.mark.parametrize("call", ["record", "query", "elapsed_time"])
def test_what_a_handler_raises_is_no_failure_of_the_device(
    device: FakeDevice, clock: DeviceClock, book: Book, call: str
) -> None:
    step(device, clock, 4)
    told = len(book.charges)

    device.interrupted = call
    with pytest.raises(WorkerDied):
        step(device, clock)
    step(device, clock, 4)

    assert not clock.failed
    assert len(book.charges) > told


@pytest.mark.usefixtures("handled")
def test_a_close_that_a_handler_interrupts_keeps_nothing(
    device: FakeDevice, clock: DeviceClock
) -> None:
    step(device, clock, 4)

    device.interrupted = "query"
    with pytest.raises(WorkerDied):
        clock.close()

    assert not clock.failed
    assert held(clock) == 0


def test_a_clock_that_is_closed_tells_what_is_done_and_keeps_nothing(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    work(device, clock, FORWARD, 1)
    work(device, clock, BACKWARD, 2)
    clock.mark(OTHER)

    clock.close()
    told = list(book.charges)
    step(device, clock, 5)

    assert book.spent() == pytest.approx({FORWARD: 0.001, BACKWARD: 0.002})

    assert held(clock) == 0
    assert book.charges == told
    assert not clock.failed


def test_autograds_own_thread_marks_as_well(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    for _ in range(5):
        work(device, clock, FORWARD, 1)
        elsewhere(lambda: work(device, clock, BACKWARD, 2))
        clock.step_finished()

    assert book.spent() == pytest.approx({FORWARD: 0.003, BACKWARD: 0.004})


def test_a_real_device_module_decides_whether_there_is_a_clock() -> None:
    def timed(kind: str) -> bool:
        return clock_for(torch.device(kind), lambda code, seconds: None) is not None

    # Of the CUDA module all is there, whether or not this machine has such a device.
    assert timed("cuda")
    assert not any(timed(kind) for kind in ("cpu", "meta", "mps"))
    assert not torch.cuda.is_initialized()


@pytest.mark.parametrize("missing", ["Event", "current_stream", "is_current_stream_capturing"])
def test_a_device_that_offers_less_has_no_clock(missing: str) -> None:
    class Module:
        Event = type("Event", (), {"elapsed_time": None})
        current_stream = is_current_stream_capturing = None

    cuda = torch.device("cuda", 0)
    whole = clock_for(cuda, lambda code, seconds: None, module=lambda _: Module)
    delattr(Module, missing)

    assert whole is not None
    assert clock_for(cuda, lambda code, seconds: None, module=lambda _: Module) is None


def held(clock: DeviceClock) -> int:
    steps = sum(len(marks) for marks in clock._closed)
    return steps + len(clock._open) + len(clock._pool) + (clock._since is not None)


def elsewhere(do: Callable[[], Any]) -> None:
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()
