"""Devices behind the driver's seam: what is asked when, what is shown, and drivers that fail."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from otel_ddp.agent.node.gpu.driver import (
    Device,
    DeviceLost,
    DriverMissing,
    NotSupported,
    Question,
    User,
)
from otel_ddp.agent.node.gpu.polling import DeviceSample, Gpus, GpuSample, identity
from otel_ddp.agent.node.source import Measurement
from otel_ddp.vocabulary import catalog

S = 1_000_000_000
PATIENCE_S = 300.0

H100 = Device("GPU-aaaa", "0", "NVIDIA H100")
T4 = Device("GPU-bbbb", "1", "Tesla T4")
A100 = Device("GPU-cccc", "2", "NVIDIA A100")
THREE = (H100, T4, A100)

POWER = Measurement(catalog.HW_POWER, 300.0)
LIMIT = Measurement(catalog.OTEL_DDP_GPU_POWER_LIMIT, 700.0)
ENERGY = Measurement(catalog.HW_ENERGY, 5000.0, start_ns=42)
CORE = Measurement(catalog.HW_TEMPERATURE, 50.0, (("hw.sensor_location", "core"),))


class FakeDriver:
    """Devices that answer as a test has them answer."""

    def __init__(self, *devices: Device) -> None:
        self.silent: list[str] = []
        self.found: Any = list(devices)
        """An error is raised instead, here and below."""
        self.opening: Exception | None = None
        self.periods_s = {"power": 1.0, "limit": 10.0}
        self.answers: dict[tuple[str, str], Any] = {}
        """By UUID and question; what is not here answers well."""
        self.questioned: dict[str, Any] = {}
        self.named: Any = "driver 999.1"
        self.tried = self.opened = self.closed = 0
        self.asked: Counter[tuple[str, str]] = Counter()

    def open(self) -> None:
        self.tried += 1
        _answer(self.opening)
        assert self.opened == self.closed, "opened twice"
        self.opened += 1

    def close(self) -> None:
        assert self.opened == self.closed + 1, "closed what is not open"
        self.closed += 1

    def version(self) -> str:
        return str(_answer(self.named))

    def devices(self) -> Sequence[Device]:
        return list(_answer(self.found))

    def questions(self, device: Device) -> Sequence[Question]:
        _answer(self.questioned.get(device.uuid))
        return [
            Question(name, every_s, lambda name=name: self._measurements(device, name))
            for name, every_s in self.periods_s.items()
        ]

    def _measurements(self, device: Device, name: str) -> Iterable[Measurement]:
        usual = {"power": [POWER], "limit": [LIMIT]}.get(name, [])
        return list(self._asked(device, name, usual))

    def users(self, device: Device) -> Sequence[User]:
        return list(self._asked(device, "users", ()))

    def _asked(self, device: Device, name: str, usual: Any) -> Any:
        assert self.opened == self.closed + 1, "asked while closed"
        self.asked[device.uuid, name] += 1
        return _answer(self.answers.get((device.uuid, name), usual))


def _answer(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer() if callable(answer) else answer


class Bench:
    """Gpus that are read once a second, by a clock of the test's."""

    def __init__(self, *devices: Device) -> None:
        self.driver = FakeDriver(*devices)
        self.gpus = Gpus([self.driver])
        self.now_ns = 1000 * S
        self.last: GpuSample | None = None

    def tick(self, seconds: float = 0.0) -> GpuSample:
        """Let this much time pass, with one reading at its end."""
        self.now_ns += int(seconds * S)
        self.last = self.gpus.read(self.now_ns)
        return self.last

    def ticks(self, count: int) -> GpuSample:
        assert count
        for _ in range(count):
            sample = self.tick(1.0)
        return sample

    def values(self, device: Device) -> dict[str, float]:
        """What the last reading shows of a device."""
        return {each.metric.name: each.value for each in self.of(device).measurements}

    def of(self, device: Device) -> DeviceSample:
        assert self.last is not None
        (found,) = (each for each in self.last.devices if each.device == device)
        return found

    def shown(self) -> list[Device]:
        assert self.last is not None
        return [each.device for each in self.last.devices]


# ------------------------------------------------------------------------------ what is shown


def test_measurements_begin_with_the_identity_that_the_catalogue_has_first() -> None:
    bench = Bench(H100)
    bench.driver.answers[H100.uuid, "power"] = [CORE, ENERGY]
    own = identity(H100)
    names = tuple(name for name, _ in own)

    bench.tick()

    assert bench.of(H100).measurements[:2] == (
        CORE._replace(attributes=(*own, ("hw.sensor_location", "core"))),
        ENERGY._replace(attributes=own),
    )
    sections = [each.attributes[:4] for each in catalog.METRICS if each.section == "GPU"]
    assert set(sections) == {names}


def test_what_a_board_does_not_support_is_asked_once_and_not_shown() -> None:
    bench = Bench(H100, T4)
    bench.driver.answers[T4.uuid, "limit"] = NotSupported("no limit")
    busy = Measurement(catalog.HW_GPU_UTILIZATION, 1.0, (("hw.gpu.task", "general"),))
    bench.driver.answers[H100.uuid, "power"] = [busy, POWER._replace(value=0.0)]

    sample = bench.tick()

    assert bench.shown() == [H100, T4]
    assert bench.values(T4) == {"hw.power": 300.0}
    of_other = {"hw.gpu.utilization": 1.0, "hw.power": 0.0, "otel_ddp.gpu.power.limit": 700.0}
    assert bench.values(H100) == of_other
    assert (sample.remark, bench.gpus.errors, sample.version) == ("", 0, "driver 999.1")

    # Also what it has answered before.
    bench.driver.answers[T4.uuid, "power"] = NotSupported("no sensor")
    bench.ticks(100)
    assert bench.values(T4) == {}
    assert bench.driver.asked[T4.uuid, "power"] == 2
    assert bench.driver.asked[T4.uuid, "limit"] == 1
    assert bench.driver.asked[H100.uuid, "power"] == 101


def test_the_processes_of_a_device_are_shown_with_it() -> None:
    bench = Bench(H100, T4)
    bench.driver.answers[H100.uuid, "users"] = [User(11, 1024), User(12, None)]
    bench.driver.answers[T4.uuid, "users"] = NotSupported("not on this platform")

    bench.ticks(5)

    assert bench.of(H100).users == (User(11, 1024), User(12, None))
    assert bench.of(T4).users == ()
    assert bench.driver.asked[T4.uuid, "users"] == 1

    # They are forgotten once they cannot be listed any more.
    bench.driver.answers[H100.uuid, "users"] = RuntimeError("unknown error")
    bench.ticks(8)
    assert bench.of(H100).users == ()


@pytest.mark.parametrize(
    "impossible",
    [
        POWER._replace(value=math.nan),
        POWER._replace(value=math.inf),
        POWER._replace(value=-1.0),
        Measurement(catalog.HW_GPU_UTILIZATION, 1.01, (("hw.gpu.task", "general"),)),
    ],
    ids=lambda each: f"{each.metric.name} {each.value}",
)
def test_an_impossible_number_is_left_out_and_counted_and_logged_once(
    impossible: Measurement, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(H100)
    bench.driver.answers[H100.uuid, "power"] = [CORE, impossible, ENERGY]

    bench.ticks(3)

    assert bench.values(H100) == {
        "hw.temperature": 50.0,
        "hw.energy": 5000.0,
        "otel_ddp.gpu.power.limit": 700.0,
    }
    assert bench.gpus.errors == 3
    assert len(caplog.records) == 1
    assert impossible.metric.name in caplog.text


# ------------------------------------------------------------------------------ what is asked when


@pytest.mark.parametrize("tick_s", [1.0, 0.999], ids=["in time", "a little early"])
def test_all_is_asked_at_once_and_then_each_question_at_its_own_period(tick_s: float) -> None:
    bench = Bench(H100)

    bench.tick()
    assert set(bench.driver.asked.values()) == {1}
    for _ in range(100):
        bench.tick(tick_s)

    assert bench.driver.asked[H100.uuid, "power"] == 101
    assert bench.driver.asked[H100.uuid, "limit"] in (10, 11)
    assert bench.values(H100) == {"hw.power": 300.0, "otel_ddp.gpu.power.limit": 700.0}


def test_a_question_that_fails_is_asked_on_and_its_old_answer_shown_for_three_periods(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(H100, T4)
    bench.tick()
    for board in (H100, T4):
        bench.driver.answers[board.uuid, "power"] = RuntimeError("unknown error")

    bench.ticks(3)
    assert bench.values(H100) == {"hw.power": 300.0, "otel_ddp.gpu.power.limit": 700.0}
    assert bench.gpus.errors == 6
    bench.tick(1.0)
    assert bench.values(H100) == {"otel_ddp.gpu.power.limit": 700.0}
    assert bench.gpus.errors == 8
    assert [each.getMessage() for each in caplog.records] == [
        "GPU: power failed (RuntimeError: unknown error); it is tried again."
    ]

    bench.driver.answers[H100.uuid, "power"] = [POWER._replace(value=1.0)]
    bench.tick(1.0)
    assert bench.values(H100)["hw.power"] == 1.0


# ------------------------------------------------------------------------------ drivers that fail


@pytest.mark.parametrize(
    ("what", "answer", "remark", "errors"),
    [
        ("opening", DriverMissing("There is no driver."), "There is no driver.", 0),
        ("opening", RuntimeError("unknown"), "The GPU driver could not be opened; the agent's ", 1),
        ("found", [], "The GPU driver is there, but it shows no device.", 0),
    ],
)
def test_a_driver_that_shows_no_device_says_why_and_is_asked_again_after_a_minute(
    what: str, answer: Any, remark: str, errors: int
) -> None:
    bench = Bench()
    bench.driver.named = RuntimeError("it says no version")
    setattr(bench.driver, what, answer)

    sample = bench.tick()
    assert (sample.devices, sample.version) == ((), "")
    assert sample.remark.startswith(remark)
    assert bench.gpus.errors == errors + bench.driver.opened
    bench.driver.opening, bench.driver.found = None, [H100]
    assert bench.ticks(59).devices == ()

    assert bench.tick(1.0).remark == ""
    assert bench.shown() == [H100]


def test_the_first_driver_that_has_devices_is_chosen_and_chosen_again_after_a_loss() -> None:
    bench, other = Bench(H100), FakeDriver(A100)
    bench.gpus = Gpus([bench.driver, other])
    bench.driver.opening = DriverMissing("There is no NVIDIA driver.")
    other.opening = DriverMissing("There is no other driver.")
    assert bench.tick().remark == "There is no NVIDIA driver. There is no other driver."

    other.opening = None
    bench.tick(60.0)
    assert bench.shown() == [A100]

    bench.driver.opening, other.found = None, DeviceLost("driver not loaded")
    bench.tick(60.0)
    bench.tick(60.0)
    assert bench.shown() == [H100]
    assert other.closed == other.opened == 1


@pytest.mark.parametrize("where", ["a question", "the questions"])
def test_a_lost_board_does_not_affect_the_others_and_is_searched_once_a_minute(where: str) -> None:
    bench = Bench(*THREE)
    lost = DeviceLost("GPU is lost")
    if where == "a question":
        bench.driver.answers[T4.uuid, "limit"] = lost
    else:
        bench.driver.questioned[T4.uuid] = lost

    for second in range(180):
        sample = bench.tick(1.0)
        assert sample.remark == "GPU 1 (Tesla T4) does not answer any more: GPU is lost."
        for board in (H100, A100):
            assert bench.values(board) == {"hw.power": 300.0, "otel_ddp.gpu.power.limit": 700.0}
        # Its answers are shown while they are fresh.
        fresh = where == "a question" and second % 60 < 4
        assert bench.values(T4) == ({"hw.power": 300.0} if fresh else {})
    assert (bench.gpus.errors, bench.driver.opened) == (0, 3)

    bench.driver.answers.clear()
    bench.driver.questioned.clear()
    assert bench.ticks(60).remark == ""
    assert bench.values(T4) == {"hw.power": 300.0, "otel_ddp.gpu.power.limit": 700.0}


@pytest.mark.parametrize("where", ["devices", "every board", "opening"])
def test_a_driver_that_is_lost_is_tried_once_a_minute(where: str) -> None:
    bench = Bench(H100, T4)
    lost = DeviceLost("driver not loaded")
    if where == "devices":
        bench.driver.found = lost
    elif where == "opening":
        bench.driver.opening = lost
    else:
        for board in (H100, T4):
            bench.driver.answers[board.uuid, "power"] = lost

    for _ in range(180):
        sample = bench.tick(1.0)
        assert sample.devices == ()
        assert sample.remark == (
            "The GPU driver went away (driver not loaded); it is opened again when it is back."
        )

    assert bench.driver.tried == 3
    assert bench.driver.opened == bench.driver.closed


def test_a_list_of_devices_that_fails_changes_nothing() -> None:
    bench = Bench(H100)
    bench.driver.found = RuntimeError("unknown error")
    sample = bench.tick()
    assert (sample.devices, bench.gpus.errors) == ((), 1)
    assert sample.remark
    bench.driver.found = [H100]
    bench.tick(60.0)
    assert bench.shown() == [H100]
    bench.driver.found = RuntimeError("unknown error")

    sample = bench.ticks(61)

    assert bench.values(H100) == {"hw.power": 300.0, "otel_ddp.gpu.power.limit": 700.0}
    assert (bench.gpus.errors, sample.remark) == (2, "")


def test_a_board_that_comes_or_goes_is_seen_within_a_minute() -> None:
    bench = Bench(H100, T4)
    bench.tick()
    bench.driver.found = [H100, A100]

    bench.ticks(59)
    assert bench.shown() == [H100, T4]
    bench.tick(1.0)

    assert bench.shown() == [H100, A100]
    assert bench.values(A100) == {"hw.power": 300.0, "otel_ddp.gpu.power.limit": 700.0}
    assert bench.driver.opened == 1


def test_a_repartitioned_board_is_asked_anew() -> None:
    part = Device("MIG-1", "0:0", "MIG 1g.10gb", H100.pci, H100.uuid)
    bench = Bench(H100)
    bench.tick()
    # Divided, it says no more what it draws.
    bench.driver.found = [H100, part]
    bench.driver.answers[H100.uuid, "power"] = NotSupported()
    bench.tick(60)
    assert "hw.power" not in bench.values(H100)

    bench.driver.found = [H100]
    del bench.driver.answers[H100.uuid, "power"]
    bench.tick(60)
    assert bench.values(H100)["hw.power"] == POWER.value
