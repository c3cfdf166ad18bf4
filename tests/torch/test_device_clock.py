"""The clock of the device, on a fake device that is as fast as the test wants it."""

from __future__ import annotations

import signal
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from make import phases_of, seconds_in
from otel_ddp.vocabulary.words import PHASES

torch = pytest.importorskip("torch")

from fake_device import FakeDevice  # noqa: E402
from otel_ddp.agent.reading.steps import StepStream  # noqa: E402
from otel_ddp.diagnosis.steps import Step  # noqa: E402
from otel_ddp.journal import layout  # noqa: E402
from otel_ddp.journal.parser import Steps  # noqa: E402
from otel_ddp.journal.writer import scratch_words  # noqa: E402
from otel_ddp.torch.device_clock import DeviceClock, clock_for  # noqa: E402

OTHER, DATA, FORWARD, BACKWARD, WAIT, OPTIMIZER = (
    PHASES[name] for name in ("other", "data", "forward", "backward", "comm_wait", "optimizer")
)
# A step: how many milliseconds the device works on each phase. With the last one the next step
# begins.
STEP = {DATA: 2, FORWARD: 8, BACKWARD: 16, WAIT: 4, OPTIMIZER: 32, OTHER: 1}
STEP_S = sum(STEP.values()) / 1000


class Book:
    """What was charged, and the words for the journal."""

    def __init__(self) -> None:
        self.charges: list[tuple[int, float]] = []
        self.words: list[int] = []
        self.present_words = scratch_words()

    def add_device_time(self, code: int, seconds: float) -> None:
        self.charges.append((code, seconds))

    def add_device_words(self, words: Sequence[int]) -> None:
        self.words += words

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
    return DeviceClock(torch.device("cuda", 3), module=device, times=book)


def word(code: int, ms: float) -> int:
    return code << layout.CODE_SHIFT | round(ms * 1e6)


def work(device: FakeDevice, clock: DeviceClock, code: int, took_ms: float) -> None:
    clock.mark(word(code, device.host_ms))
    device.host_ms += took_ms


def ended(device: FakeDevice, clock: DeviceClock, number: int = 1) -> None:
    clock.mark(word(OTHER, device.host_ms))
    clock.step_finished(number, round(device.host_ms * 1e6))
    device.host_ms += STEP[OTHER]


def step(device: FakeDevice, clock: DeviceClock, times: int = 1) -> None:
    for _ in range(times):
        for code, took_ms in STEP.items():
            if code != OTHER:
                work(device, clock, code, took_ms)
        ended(device, clock)


def test_the_phases_are_charged_in_order_and_add_up(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    step(device, clock, 5)

    assert {each.stream for each in device.recorded} == {"the stream of 3"} == {clock.stream}
    # The last phase of a step ends with the first mark of the next one.
    once = [(code, took_ms / 1000) for code, took_ms in STEP.items()]
    assert book.charges == (5 * once)[:-1]
    assert book.all() == pytest.approx(5 * STEP_S - STEP[OTHER] / 1000)


def test_the_journal_says_while_an_event_is_being_recorded(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    at, seen = layout.IN_MARK // 8, []
    device.during = lambda _: seen.append(book.present_words[at])
    device.broken = "record"

    work(device, clock, FORWARD, 8)

    assert seen == [1]
    assert book.present_words[at] == 0


def test_what_the_device_has_not_done_is_charged_later_and_whole(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    device.late = True
    step(device, clock, 10)
    assert book.charges == []

    device.late = False
    device.finish_all()
    step(device, clock)

    assert book.all() == pytest.approx(11 * STEP_S - STEP[OTHER] / 1000)


def test_a_stream_that_was_ahead_takes_no_time_from_other_phases(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    work(device, clock, FORWARD, 8)
    began = device.host_ms
    work(device, clock, BACKWARD, -3)
    work(device, clock, OPTIMIZER, 0)
    device.host_ms = began + 5
    ended(device, clock)
    step(device, clock, 3)

    assert book.charges[:2] == [(FORWARD, 0.008), (OPTIMIZER, 0.005)]


def test_many_layers_and_micro_batches_leave_a_step_timed(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    # FSDP over 80 layers, 32 micro-batches: each waits twice in forward and backward.
    for _ in range(80 * 32 * 2):
        work(device, clock, WAIT, 1)
        work(device, clock, BACKWARD, 1)
    ended(device, clock)

    assert book.spent() == pytest.approx({WAIT: 5.12, BACKWARD: 5.12})


def test_a_step_in_which_a_graph_is_captured_is_dropped_whole(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    step(device, clock)
    work(device, clock, FORWARD, 100)
    device.capturing = True
    work(device, clock, BACKWARD, 1000)
    device.capturing = False
    work(device, clock, OPTIMIZER, 10_000)
    ended(device, clock)
    step(device, clock, 3)

    # The first step and the third; the time between them is unknown.
    last = STEP[OTHER] / 1000
    assert book.all() == pytest.approx(4 * STEP_S - 2 * last)


@pytest.mark.parametrize(("marks", "kept"), [(6, 256), (60, 256), (200, 16384 // 201)])
def test_a_device_that_stays_behind_costs_steps_and_no_memory(
    device: FakeDevice, clock: DeviceClock, book: Book, marks: int, kept: int
) -> None:
    device.late = True
    for _ in range(300):
        for _ in range(marks):
            work(device, clock, FORWARD, 1)
        ended(device, clock)

    assert device.made <= (kept + 1) * (marks + 1)
    assert book.charges == []

    device.late = False
    step(device, clock, 300)
    assert book.all() == pytest.approx(300 * STEP_S - STEP[OTHER] / 1000)


@pytest.mark.parametrize("call", ["record", "query", "elapsed_time"])
def test_a_device_that_fails_is_left_alone_for_good(
    device: FakeDevice, clock: DeviceClock, book: Book, call: str
) -> None:
    step(device, clock, 4)
    told = list(book.charges)

    device.broken = call
    step(device, clock)
    device.broken = ""
    recorded = len(device.recorded)
    step(device, clock, 5)

    assert clock.failed
    assert book.charges == told
    assert len(device.recorded) == recorded
    assert held(clock) == 0


class WorkerDied(RuntimeError):
    """As torch raises it in its own handler, when a worker of a data loader is killed."""


def test_what_a_handler_raises_is_no_failure_of_the_device(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    def handle(*_: Any) -> None:
        raise WorkerDied

    before = signal.signal(signal.SIGUSR1, handle)
    step(device, clock, 4)
    told = len(book.charges)

    device.interrupt("record")
    with pytest.raises(WorkerDied):
        step(device, clock)
    signal.signal(signal.SIGUSR1, before)
    step(device, clock, 4)

    assert not clock.failed
    assert len(book.charges) > told


def test_a_clock_that_is_closed_tells_what_is_done_and_keeps_nothing(
    device: FakeDevice, clock: DeviceClock, book: Book
) -> None:
    work(device, clock, FORWARD, 1)
    work(device, clock, BACKWARD, 2)
    clock.mark(word(OTHER, device.host_ms))

    clock.close()
    told = list(book.charges)
    step(device, clock, 5)

    assert book.spent() == pytest.approx({FORWARD: 0.001, BACKWARD: 0.002})

    assert held(clock) == 0
    assert book.charges == told
    assert not clock.failed


class Phases(NamedTuple):
    """A step: of each phase, how long the host launches and the device works, in milliseconds."""

    data: tuple[float, float] = (1, 0)
    forward: tuple[float, float] = (2, 10)
    backward: tuple[float, float] = (4, 20)
    comm_wait: tuple[float, float] = (0.1, 5)
    optimizer: tuple[float, float] = (1, 3)


class Trained:
    """Steps on such a device, as they are read from the journal."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.book = Book()
        self.clock = DeviceClock(torch.device("cuda", 0), module=device, times=self.book)
        self.number = 0
        # The device's time from the end of a step to that of the next one, and its true lag.
        self.ends_ms: list[tuple[float, float]] = []

    def step(self, phases: Phases, times: int = 1) -> None:
        device = self.device
        for _ in range(times):
            for name, (host_ms, device_ms) in phases._asdict().items():
                self.clock.mark(word(PHASES[name], device.host_ms))
                device.launch(host_ms, device_ms)
            self.number += 1
            self.clock.mark(word(OTHER, device.host_ms))
            self.ends_ms.append((max(device.busy_until_ms, device.host_ms), device.host_ms))
            self.clock.step_finished(self.number, round(device.host_ms * 1e6))

    def steps(self) -> list[Step]:
        words = struct.pack(f"<{len(self.book.words)}Q", *self.book.words)
        return StepStream(0).feed(Steps(0, words, 0, True))


def seconds(step: Step) -> dict[str, float]:
    return {word: seconds_in(step, code) for word, code in PHASES.items() if seconds_in(step, code)}


def paced_ms(step: Step) -> dict[str, float]:
    words = {code: word for word, code in PHASES.items()}
    shift = layout.PACED_SHIFT
    return {words[each >> shift]: (each & (1 << shift) - 1) / 1e6 for each in step.paced}


def test_steps_are_told_by_the_clock_of_a_device_that_is_behind() -> None:
    trained = Trained(FakeDevice())
    trained.step(Phases(), 40)
    trained.device.finish_all()
    trained.step(Phases())

    steps = trained.steps()
    # The first one was not seen from its beginning.
    assert [step.number for step in steps[:39]] == list(range(2, 41))
    for step in steps[2:39]:
        assert seconds(step) == pytest.approx(
            {"forward": 0.010, "backward": 0.020, "comm_wait": 0.005, "optimizer": 0.003}
        )
    for step in steps[5:39]:
        # It keeps up with its host in no phase.
        assert step.paced == ()
        assert step.number is not None
        reached_ms, host_ms = trained.ends_ms[step.number - 1]
        assert step.lag_ns == pytest.approx((reached_ms - host_ms) * 1e6, abs=100_000)


@pytest.mark.parametrize(
    ("phases", "paced"),
    [
        # The host needs 67.1 ms for a step, the device 38.
        (Phases(data=(60, 0)), {"data": 67.1 - 38}),
        (
            Phases((1, 0), (12, 10), (25, 20), (0.1, 0), (4, 3)),
            {"data": 1.0, "forward": 12.0, "backward": 25.0, "comm_wait": 0.1, "optimizer": 4.0},
        ),
    ],
    ids=["runs dry", "waits for launches"],
)
def test_a_device_has_kept_up_where_it_had_nothing_to_do(
    phases: Phases, paced: dict[str, float]
) -> None:
    trained = Trained(FakeDevice())
    trained.step(phases, 20)

    for step in trained.steps()[2:]:
        assert paced_ms(step) == pytest.approx(paced)
        assert seconds(step)["data"] == pytest.approx(paced["data"] / 1000)


def test_steps_that_are_not_measured_are_one_stretch_and_the_device_is_as_late_after_it() -> None:
    trained = Trained(FakeDevice())
    trained.step(Phases(), 5)
    trained.clock.pause()
    trained.step(Phases(), 7)
    trained.clock.resume(12, word(OTHER, trained.device.host_ms))
    trained.step(Phases(), 3)
    trained.device.finish_all()
    trained.step(Phases())

    steps = {each.number: each for each in trained.steps()}
    assert steps.keys() == {2, 3, 4, 5, 12, 13, 14, 15}
    assert phases_of(steps[12]) == {OTHER}
    assert steps[12].took_ns == pytest.approx(7 * steps[4].took_ns)
    reached_ms, host_ms = trained.ends_ms[11]
    assert steps[12].lag_ns == pytest.approx((reached_ms - host_ms) * 1e6, abs=100_000)
    assert seconds(steps[13]) == pytest.approx(seconds(steps[4]))


def test_where_the_device_is_is_known_while_the_host_stands_still() -> None:
    device = FakeDevice()
    trained = Trained(device)
    trained.step(Phases(), 20)
    device.finish_all()
    trained.step(Phases())
    # Forward takes it 10 ms and backward 20 ms.
    device.host_ms = device.busy_until_ms - 3 - 5 - 1
    assert trained.clock.position() == (BACKWARD, 20)

    device.finish_all()
    assert trained.clock.position() == (OTHER, None)

    trained.clock.close()
    assert trained.clock.position() is None


def test_a_real_device_module_decides_whether_there_is_a_clock() -> None:
    def timed(kind: str) -> bool:
        return clock_for(torch.device(kind), Book()) is not None

    # Of the CUDA module all is there, whether or not this machine has such a device.
    assert timed("cuda")
    assert not any(timed(kind) for kind in ("cpu", "meta"))
    assert not torch.cuda.is_initialized()


def held(clock: DeviceClock) -> int:
    steps = sum(len(marks) for marks in clock._closed)
    return steps + len(clock._open) + len(clock._pool) + (clock._time.since is not None)
