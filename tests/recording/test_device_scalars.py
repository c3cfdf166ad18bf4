"""Tensors of a device: recorded as they were logged, and never waited for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import otel_ddp
from conftest import Here, Journal
from fake_device import FakeDevice
from odd_values import DeviceTensor, on_device, waited
from otel_ddp.journal import layout
from otel_ddp.journal.writer import JournalWriter
from otel_ddp.recording.recorder import Recorder
from otel_ddp.vocabulary import catalog

torch = pytest.importorskip("torch")

from otel_ddp.recording.device_scalars import DeviceScalars  # noqa: E402


@pytest.fixture
def device() -> Iterator[FakeDevice]:
    waited.clear()
    yield FakeDevice(late=True)
    assert waited == []


@pytest.fixture
def recorder(place: Here, device: FakeDevice) -> Iterator[Recorder]:
    writer = JournalWriter(place.directory, 512 * 1024, {})
    recorder = Recorder(writer)
    recorder.gate.check_due_ns = 2**63  # the test looks around itself
    recorder.device_scalars = DeviceScalars(
        recorder._copy_arrived,
        module=lambda _: device,
        slab=lambda: torch.empty(256, dtype=torch.double),
    )
    recorder.writer.state(0, 1)
    yield recorder
    recorder.close()


def log(recorder: Recorder, metrics: Any, step: int | None = None) -> None:
    recorder.log(metrics, step=step)


def refused(journal: Journal) -> float:
    return journal.total(catalog.OTEL_DDP_VALUES_REFUSED)


def test_a_tensor_is_recorded_once_it_arrived_with_the_step_and_time_of_its_logging(
    recorder: Recorder, device: FakeDevice, place: Here
) -> None:
    log(recorder, {"loss": on_device([[0.5]], dtype=torch.bfloat16), "lr": 0.1}, step=7)
    log(recorder, {"lr": 0.2}, step=8)
    recorder.poll_copies()
    before = place.only()

    device.finish_all()
    recorder.poll_copies()

    assert before.points == [("lr", 0.1), ("lr", 0.2)]
    after = place.only()
    assert after.points == [("lr", 0.1), ("lr", 0.2), ("loss", 0.5)]
    first, _, landed = after.calls
    assert (7, first.time_ns) == (landed.step, landed.time_ns)


def test_the_journal_says_while_a_copy_waits_for_a_place_in_the_launch_queue(
    recorder: Recorder, device: FakeDevice
) -> None:
    at, seen = layout.IN_MARK // 8, []
    device.during = lambda _: seen.append(recorder.writer.words[at])

    log(recorder, {"loss": on_device(0.5)})

    assert seen == [1]
    assert recorder.writer.words[at] == 0


def test_the_quick_way_never_asks_a_tensor(
    recorder: Recorder, device: FakeDevice, place: Here
) -> None:
    log(recorder, {"loss": 1.0, "lr": 1})
    log(recorder, {"loss": 1.0, "lr": 1.0})

    # The names are known now; only the types tell that this is another matter.
    log(recorder, {"loss": on_device(2.0), "lr": on_device(3.0)}, step=1)
    log(recorder, {"loss": 4.0, "lr": on_device(5.0)}, step=2)
    device.finish_all()
    recorder.poll_copies()

    expected = [("loss", 1.0), ("lr", 1.0)] * 2
    expected += [("loss", 4.0), ("loss", 2.0), ("lr", 3.0), ("lr", 5.0)]
    # Which one lands while a later one takes off is the device's business.
    assert sorted(expected) == sorted(place.only().points)


@pytest.mark.parametrize("where", ["step", "epoch", "split"])
def test_a_tensor_where_a_plain_number_belongs_is_refused_and_not_asked(
    where: str, recorder: Recorder, place: Here
) -> None:
    given: dict[str, Any] = {"step": None, "epoch": None, "split": None, where: on_device(1.0)}
    recorder.log({"loss": 1.0})

    recorder.log({"loss": 2.0}, **given)

    journal = place.only()
    assert journal.points == [("loss", 1.0), ("loss", 2.0)]
    assert refused(journal) == 1


def test_where_too_many_are_on_their_way_the_next_is_refused_and_room_comes_back(
    recorder: Recorder, device: FakeDevice, place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(300):
        log(recorder, {"loss": on_device(1.0)}, step=step)

    assert refused(place.only()) == 300 - 256
    (said,) = caplog.messages
    assert "256 tensors are still on their way" in said

    device.finish_all()
    log(recorder, {"loss": on_device(1.0)}, step=300)
    device.finish_all()
    recorder.poll_copies()

    assert len(place.only().calls) == 257
    assert refused(place.only()) == 300 - 256


def test_page_locked_memory_that_is_lacking_is_asked_for_once(
    recorder: Recorder, place: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def lacking() -> Any:
        asked.append(1)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(recorder.device_scalars, "_make_slab", lacking)
    for step in range(3):
        log(recorder, {"loss": on_device(0.5), "lr": 0.1}, step=step)

    assert len(asked) == 1
    assert (place.only().points, refused(place.only())) == ([("lr", 0.1)] * 3, 3.0)


def test_while_a_graph_is_captured_nothing_is_sent_and_nothing_is_asked(
    recorder: Recorder, device: FakeDevice, place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    log(recorder, {"loss": on_device(1.0)}, step=1)
    device.finish_all()
    device.capturing = True

    log(recorder, {"loss": on_device(2.0)}, step=2)
    recorder.poll_copies()

    assert place.only().points == []
    assert refused(place.only()) == 1
    assert caplog.messages == [
        "'loss' was not recorded: a graph is being captured; log outside of it."
    ]
    device.capturing = False
    recorder.poll_copies()
    assert place.only().points == [("loss", 1.0)]


def test_a_device_that_failed_costs_its_tensors_and_nothing_else(
    recorder: Recorder, device: FakeDevice, place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(3):
        log(recorder, {"loss": on_device(1.0), "lr": 0.1}, step=step)
    device.broken = "query"

    recorder.poll_copies()
    log(recorder, {"lr": 0.2})
    recorder.poll_copies(wait=True)

    assert [value for _, value in place.only().points] == [0.1, 0.1, 0.1, 0.2]
    assert refused(place.only()) == 3
    assert caplog.messages == ["tensors logged last were lost: their device failed."]


def test_a_hung_device_holds_the_end_for_a_moment_only(
    recorder: Recorder, device: FakeDevice, place: Here
) -> None:
    log(recorder, {"loss": on_device(1.0)})

    recorder.poll_copies(wait=True)

    assert refused(place.only()) == 1


def test_an_event_is_recorded_on_the_stream_of_the_tensors_own_device(
    recorder: Recorder, device: FakeDevice, place: Here
) -> None:
    for where in ("cuda:0", "cuda:1", "cuda:0"):
        log(recorder, {"loss": on_device(1.0, where)})
        device.finish_all()
    recorder.poll_copies()

    first, second, third = device.recorded
    assert (third.stream, second.stream) == ("the stream of cuda:0", "the stream of cuda:1")
    assert first is third, "an event is used again, on its own device"
    assert first is not second


def test_inference_mode_and_another_default_device_do_not_matter(
    recorder: Recorder, device: FakeDevice, place: Here
) -> None:
    with torch.inference_mode():
        log(recorder, {"val/loss": on_device(1.0)})
    tensor = on_device(2.0)
    with torch.device("meta"):
        log(recorder, {"loss": tensor})
    device.finish_all()
    recorder.poll_copies()

    assert place.only().points == [("val/loss", 1.0), ("loss", 2.0)]


def test_a_tensor_that_is_no_number_is_refused_and_the_rest_recorded(
    recorder: Recorder, place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        log(recorder, {"x": on_device([1.0, 2.0]), "y": on_device(1j), "lr": 0.1})

    assert place.only().points == [("lr", 0.1)] * 2
    assert refused(place.only()) == 4
    of_x, of_y = caplog.messages
    assert "'x' was not recorded: one number was expected, got 2 (shape (2,))" in of_x
    assert "'y' was not recorded: a complex number has no place on a curve" in of_y


class Replicated:
    def is_replicate(self) -> bool:
        return True


class Sharded:
    def is_replicate(self) -> bool:
        return False


class FakeDTensor(DeviceTensor):
    def to_local(self) -> Any:
        return on_device(self.as_subclass(torch.Tensor).item())


def test_a_tensor_spread_over_ranks_is_recorded_where_it_is_whole_and_else_refused(
    recorder: Recorder, device: FakeDevice, place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    whole, part = (torch.tensor(1.5).as_subclass(FakeDTensor) for _ in range(2))
    whole.placements, part.placements = (Replicated(),), (Replicated(), Sharded())

    log(recorder, {"whole": whole, "part": part})
    device.finish_all()
    recorder.poll_copies()

    assert place.only().points == [("whole", 1.5)]
    (said,) = caplog.messages
    assert "'part' was not recorded: its parts are spread over ranks" in said


def test_a_device_without_events_gives_one_warning_and_costs_nothing_else(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    with otel_ddp.init() as run:
        for _ in range(2):
            run.log({"loss": torch.zeros((), device="meta"), "lr": 0.1}, step=1)

    assert place.only().points == [("lr", 0.1)] * 2
    (said,) = caplog.messages
    assert "'loss' was not recorded: a tensor on meta cannot be copied" in said
