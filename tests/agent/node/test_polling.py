"""Devices behind the driver's seam: what is shown, and drivers that fail."""

from __future__ import annotations

import math
from typing import Any

import pytest

from agent.node.fake_driver import LIMIT, POWER, FakeDriver
from otel_ddp.agent.node.gpu.nvml import Device, DriverMissing, User
from otel_ddp.agent.node.gpu.nvml_questions import DeviceLost, NotSupported
from otel_ddp.agent.node.gpu.polling import DeviceSample, Gpus, GpuSample, identity
from otel_ddp.agent.node.source import Measurement
from otel_ddp.vocabulary import catalog

S = 1_000_000_000

H100 = Device("GPU-aaaa", "0", "NVIDIA H100")
T4 = Device("GPU-bbbb", "1", "Tesla T4")
A100 = Device("GPU-cccc", "2", "NVIDIA A100")
THREE = (H100, T4, A100)

ENERGY = Measurement(catalog.HW_ENERGY, 5000.0, start_ns=42)
CORE = Measurement(catalog.HW_TEMPERATURE, 50.0, (("hw.sensor_location", "core"),))


class Bench:
    """Gpus that are read once a second, by a clock of the test's."""

    def __init__(self, *devices: Device) -> None:
        self.driver = FakeDriver(*devices)
        self.gpus = Gpus(self.driver, clock_ns=lambda: self.now_ns)
        self.now_ns = 1000 * S
        self.last: GpuSample | None = None

    def tick(self, seconds: float = 0.0) -> GpuSample:
        """Let this much time pass, with one reading at its end."""
        self.now_ns += int(seconds * S)
        self.last = self.gpus.read()
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
    bench.ticks(5)

    assert bench.of(H100).users == (User(11, 1024), User(12, None))
    assert bench.of(T4).users == ()

    # None is shown where they cannot be listed.
    bench.driver.answers[H100.uuid, "users"] = RuntimeError("unknown error")
    bench.tick(1.0)
    assert bench.of(H100).users == ()


def test_an_impossible_number_is_left_out_and_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(H100)
    bench.driver.answers[H100.uuid, "power"] = [CORE, POWER._replace(value=math.nan), ENERGY]

    bench.ticks(3)

    # All begin with the identity that the catalogue has first.
    own = identity(H100)
    assert bench.of(H100).measurements == (
        CORE._replace(attributes=(*own, ("hw.sensor_location", "core"))),
        ENERGY._replace(attributes=own),
        LIMIT._replace(attributes=own),
    )
    assert bench.gpus.errors == 3
    assert len(caplog.records) == 1
    assert "hw.power" in caplog.text


def test_a_question_that_fails_is_asked_on_and_has_no_answer_meanwhile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench(H100, T4)
    bench.tick()
    for board in (H100, T4):
        bench.driver.answers[board.uuid, "power"] = RuntimeError("unknown error")

    bench.ticks(3)
    assert bench.values(H100) == {"otel_ddp.gpu.power.limit": 700.0}
    assert bench.gpus.errors == 6
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
        (
            "found",
            RuntimeError("unknown"),
            "The GPU driver went away (its devices could not be ",
            1,
        ),
    ],
)
def test_a_driver_that_shows_no_device_says_why_and_is_asked_again_after_a_minute(
    what: str, answer: Any, remark: str, errors: int
) -> None:
    bench = Bench()
    setattr(bench.driver, what, answer)

    sample = bench.tick()
    assert sample.devices == ()
    assert sample.remark.startswith(remark)
    assert bench.gpus.errors == errors
    bench.driver.opening, bench.driver.found = None, [H100]
    assert bench.ticks(59).devices == ()

    assert bench.tick(1.0).remark == ""
    assert bench.shown() == [H100]


def test_a_lost_board_does_not_affect_the_others_and_is_searched_once_a_minute() -> None:
    bench = Bench(*THREE)
    bench.driver.answers[T4.uuid, "limit"] = DeviceLost("GPU is lost")

    for second in range(180):
        sample = bench.tick(1.0)
        assert sample.remark == "GPU 1 (Tesla T4) does not answer any more: GPU is lost."
        for board in (H100, A100):
            assert bench.values(board) == {"hw.power": 300.0, "otel_ddp.gpu.power.limit": 700.0}
        # What it says before it fails is shown; then it is asked no more.
        assert bench.values(T4) == ({} if second % 60 else {"hw.power": 300.0})
    assert (bench.gpus.errors, bench.driver.opened) == (0, 3)

    bench.driver.answers.clear()
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


def test_a_board_that_comes_or_is_divided_is_seen_and_asked_anew_within_a_minute() -> None:
    part = Device("MIG-1", "0:0", "MIG 1g.10gb", H100.pci, H100.uuid)
    bench = Bench(H100)
    bench.tick()
    # Divided, it says no more what it draws.
    bench.driver.answers[H100.uuid, "power"] = NotSupported()
    bench.driver.found = RuntimeError("a list that fails changes nothing")
    bench.ticks(60)
    assert bench.shown() == [H100]
    bench.driver.found = [H100, part]
    bench.ticks(60)
    assert bench.shown() == [H100, part]
    assert "hw.power" not in bench.values(H100)

    bench.driver.found = [H100]
    del bench.driver.answers[H100.uuid, "power"]
    bench.tick(60)
    assert bench.values(H100)["hw.power"] == POWER.value
    assert bench.driver.opened == 1
