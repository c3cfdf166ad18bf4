"""NVIDIA's devices: through pynvml, over a library in C that stands in for the driver's."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.node.node_trees import rows
from golden import Golden
from nvml_boards import GIB, Board, Boards, h100, show_here, standin_library
from otel_ddp.agent.node.nvml import DeviceSample, Gpus, GpuSample, User, identity
from otel_ddp.agent.node.source import Measurement
from otel_ddp.vocabulary import catalog

BOOT_S = 1_700_000_000
NOW_NS = 1_800_000_000 * 10**9

Answers = dict[tuple[str, str], float]


class Seen:
    """Boards that NVML shows, read on a clock of the test's."""

    def __init__(self, shown: Boards) -> None:
        self.shown = shown
        self.now_s = 100.0
        self.gpus = Gpus(
            clock=lambda: self.now_s, wall_ns=lambda: NOW_NS, boot_ns=lambda: BOOT_S * 10**9
        )
        self.boards: list[Board] = []

    def show(self, *boards: Board, **whole: int | str) -> None:
        self.boards = list(boards) or self.boards
        self.shown.write(self.boards, **whole)

    def read(self, *boards: Board, after_s: float = 0.0) -> GpuSample:
        """What is read after so long, of these boards from now on."""
        self.now_s += after_s
        self.show(*boards)
        return self.gpus.read()

    def devices(self, *boards: Board, after_s: float = 0.0) -> dict[str, DeviceSample]:
        """The same, by index."""
        sample = self.read(*boards, after_s=after_s)
        return {each.device.index: each for each in sample.devices}

    def answers(self, *boards: Board) -> Answers:
        """What the only device says when it is read for the second time."""
        self.read(*boards)
        (sample,) = self.read(after_s=2.0).devices
        return answers(sample)


def answers(sample: DeviceSample) -> Answers:
    """(Metric, last attribute) -> value; each series occurs once."""
    found: Answers = {}
    own = identity(sample.device)
    for each in sample.measurements:
        key = (each.metric.name, each.attributes[-1][1] if each.attributes[len(own) :] else "")
        assert key not in found, f"{key} twice"
        assert each.attributes[: len(own)] == own
        assert each.metric.attributes == tuple(name for name, _ in each.attributes)
        found[key] = each.value
    return found


def faults(sample: DeviceSample) -> dict[str, float]:
    return {dict(each.attributes)["code"]: each.value for each in of_faults(sample)}


def of_faults(sample: DeviceSample) -> list[Measurement]:
    return [each for each in sample.measurements if each.metric is catalog.OTEL_DDP_GPU_XID_ERRORS]


@pytest.fixture
def seen(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Seen]:
    """Through pynvml and ctypes; nothing of the library may be held at the end."""
    boards = Boards(tmp_path)
    library = show_here(boards, standin_library(tmp_path_factory), monkeypatch)
    before = library.standin_open(), library.standin_held()
    seen = Seen(boards)
    yield seen
    seen.show(loaded=1)
    seen.gpus.close()
    assert (library.standin_open(), library.standin_held()) == before


# --- what boards say


def test_a_board_with_everything_answers_in_our_units(seen: Seen, golden: Golden) -> None:
    found = seen.answers(h100())

    # Two seconds at 100 and at 300 MiB/s are 200 and 600 of `hw.gpu.io`.
    golden.check(*(f"{name} {key}: {value:.10g}" for (name, key), value in sorted(found.items())))
    # Faults are told once there are any, and the memory of a rank where there are ranks.
    others = {"otel_ddp.gpu.xid.errors", "otel_ddp.gpu.process.memory.usage"}
    assert {name for name, _ in found} | others == rows("GPU")


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        # Older drivers, a driver without the older call; without a field, the older call for it.
        ({"memory.reserved": "!13"}, {("hw.gpu.memory.usage", ""): 60 * GIB}),
        (
            {"event_reasons": "!13", "throttle_reasons": 4},
            {("otel_ddp.gpu.throttle.active", "sw_power"): 1},
        ),
        ({"temperature": "!13", "temperature_v": 55}, {("hw.temperature", "core"): 55}),
        ({"field.186": "!2", "field.82": "!2"}, {("hw.power", ""): 111.0}),
        # Without GPM the driver's own count; links of the fifth generation are added up.
        ({"gpm": "!3"}, {("hw.gpu.io", "transmit"): 5 << 32, ("hw.gpu.io", "receive"): 6 << 32}),
        (
            {"field.91": "1 2", "field.138.all": "!3", "field.202": "3 1000", "field.202.1": "3 1"},
            {("otel_ddp.gpu.nvlink.io", "transmit"): 1001},
        ),
        # What is rounded above the whole is the whole.
        ({"gpm.2": 100.0000001}, {("otel_ddp.gpu.engine.active", "sm"): 1.0}),
    ],
)
def test_a_board_that_lacks_a_way_answers_by_another(
    seen: Seen, changed: dict[str, Any], found: Answers
) -> None:
    board = h100()
    board.numbers |= changed

    answers = seen.answers(board)

    assert {key: answers[key] for key in found} == pytest.approx(found)


def test_only_what_a_board_lacks_is_absent(seen: Seen) -> None:
    board = h100().without("gpm", "power_limit", "ecc.")
    board.xids = None
    whole = {name for name, _ in seen.answers(h100())}
    codes = dict(zip((2, 3, 4, 13, 25), map(h100, range(1, 6)), strict=True))
    for code, each in codes.items():
        each.numbers["energy_mj"] = f"!{code}"

    first, *others = seen.read(board, *codes.values(), after_s=60.0).devices

    lacks = {"hw.errors", "otel_ddp.gpu.power.limit", "otel_ddp.gpu.engine.active"}
    assert {name for name, _ in answers(first)} == whole - lacks
    assert all(("hw.energy", "") not in answers(each) for each in others)
    # Counters of the driver count since the machine was started.
    starts_ns = {each.metric: each.start_ns for each in first.measurements}
    assert starts_ns[catalog.OTEL_DDP_GPU_NVLINK_IO] == BOOT_S * 10**9
    assert starts_ns[catalog.HW_POWER] == 0


# --- numbers that cannot be


@pytest.mark.parametrize(
    ("key", "value", "metric"),
    [
        ("temperature", 255, "hw.temperature"),
        ("memory.total", 0, "hw.gpu.memory.limit"),
        ("event_reasons", 2**64 - 1, "otel_ddp.gpu.throttle.active"),
        ("field.186", f"1 {0xFFFFFFFF}", "hw.power"),
        ("gpm.2", "nan", "otel_ddp.gpu.engine.active"),
    ],
)
def test_a_number_beyond_its_bounds_is_none(
    seen: Seen, key: str, value: int | str, metric: str
) -> None:
    board = h100()
    whole = seen.answers(board)
    board.numbers[key] = value

    missing = whole.keys() - seen.answers(board).keys()

    # Of a mask of bits nothing can be believed.
    assert len(missing) == (8 if metric == "otel_ddp.gpu.throttle.active" else 1)
    assert {name for name, _ in missing} == {metric}


# --- Xid


def test_faults_are_counted_by_code_from_the_first_on(seen: Seen) -> None:
    board = h100()
    board.xids = [48]

    before = seen.devices(board)["0"]
    board.xids += [31, 31, 143]
    after = seen.devices()["0"]

    # What happened before anyone looked is not ours to tell.
    assert of_faults(before) == []
    assert faults(after) == {"31": 2, "143": 1}
    assert {each.start_ns for each in of_faults(after)} == {NOW_NS}
    assert {dict(each.attributes)["pci"] for each in of_faults(after)} == {"00000000:1B:00.0"}
    assert faults(seen.devices()["0"]) == {"31": 2, "143": 1}


def test_the_fault_that_ends_a_board_is_still_counted(seen: Seen) -> None:
    board, other = h100(0), h100(1)
    device = seen.devices(board, other)["0"].device
    assert board.xids is not None
    board.xids.append(79)
    board.lost = True
    seen.read(after_s=5.0)

    fallen = seen.devices(after_s=60.0)["0"]

    assert fallen.device == device
    assert {each.metric for each in fallen.measurements} == {catalog.OTEL_DDP_GPU_XID_ERRORS}
    assert (faults(fallen), fallen.users) == ({"79": 1}, ())
    board.lost = False
    back = seen.devices(after_s=60.0)["0"]
    assert answers(back)["hw.temperature", "core"] == 64
    assert faults(back) == {"79": 1}


# --- the users of a board


def test_each_process_of_a_board_is_listed_once(seen: Seen) -> None:
    board = h100()
    board.compute = [(10, 5 * GIB), (11, None), (12, None)]
    board.mps = [(10, 1), (11, 2 * GIB)]

    users = seen.devices(board)["0"].users

    assert sorted(users) == [User(10, 5 * GIB), User(11, 2 * GIB), User(12, None)]


# --- no driver


@pytest.mark.parametrize(
    ("whole", "words"),
    [
        ({"loaded": 0}, "no NVIDIA driver (Driver Not Loaded)"),
        ({"init": 4}, "does not answer (Insufficient Permissions): see `nvidia-smi`; a container"),
        ({}, "shows no GPU"),
    ],
)
def test_one_sentence_says_why_there_are_no_devices(
    seen: Seen, whole: dict[str, int], words: str
) -> None:
    boards = [h100()] if whole else []
    seen.shown.write(boards, **whole)

    said = seen.gpus.read()

    assert said.devices == ()
    assert words in said.remark
    assert said.remark.endswith(".")
    assert seen.devices(h100(), after_s=59.0) == {}
    again = seen.read(after_s=1.0)
    assert (again.version, again.remark) == ("NVIDIA driver 550.54.14", "")


# --- all boards, from reading to reading


def test_what_fails_is_absent_and_logged_once_and_asked_again(
    seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    board = h100()
    board.numbers["temperature"] = "!999"
    seen.read(board)
    (sample,) = seen.read(after_s=5.0).devices

    assert ("hw.temperature", "core") not in answers(sample)
    assert len(caplog.records) == 1
    assert "GPU: nvmlDeviceGetTemperature failed (" in caplog.text
    board.numbers["temperature"] = 64
    assert ("hw.temperature", "core") in answers(seen.devices(after_s=5.0)["0"])


def test_a_lost_board_does_not_affect_the_others_and_is_searched_once_a_minute(seen: Seen) -> None:
    first, second, third = (h100(index) for index in range(3))
    seen.read(first, second, third)
    second.lost = True

    for _ in range(11):
        sample = seen.read(after_s=5.0)
        assert "GPU 1 (NVIDIA H100 80GB HBM3) does not answer any more: " in sample.remark
        assert [bool(each.measurements) for each in sample.devices] == [True, False, True]
    for after_s in (5.0, 60.0):
        sample = seen.read(after_s=after_s)
        assert "GPU 1 does not answer (" in sample.remark
        assert [each.device.index for each in sample.devices] == ["0", "2"]
    second.lost = False
    # The driver shows a board that was reset once it is opened anew.
    sample = seen.read(after_s=60.0)
    assert (sample.remark, [each.device.index for each in sample.devices]) == ("", ["0", "1", "2"])


# A driver that is loaded anew knows no handle of before.
@pytest.mark.parametrize("whole", [{"loaded": 0}, {"generation": 2}])
def test_a_driver_that_is_lost_is_opened_again_after_a_minute(
    seen: Seen, whole: dict[str, int]
) -> None:
    seen.read(h100(), h100(1))
    seen.show(**whole)
    seen.now_s += 5.0

    lost = seen.gpus.read()

    assert lost.devices == ()
    assert lost.remark.startswith("The GPU driver went away (")
    seen.now_s += 54.0
    seen.show(generation=3)
    assert seen.gpus.read().devices == ()
    seen.now_s += 1.0
    back = seen.gpus.read()
    assert (back.remark, len(back.devices)) == ("", 2)


# --- a real board


@pytest.mark.gpu
def test_a_real_board_answers_in_our_units() -> None:
    gpus = Gpus()
    gpus.read()
    time.sleep(0.2)  # the driver refuses samples that are too close
    sample = gpus.read()
    if not sample.devices:
        pytest.skip(f"needs an NVIDIA GPU: {sample.remark}")

    sys.stderr.write(f"{sample}\n")
    found = [each for device in sample.devices for each in device.measurements]
    expected = {catalog.HW_POWER, catalog.HW_TEMPERATURE, catalog.OTEL_DDP_GPU_THROTTLE_ACTIVE}
    assert expected <= {each.metric for each in found}
    limits = [each.value for each in found if each.metric is catalog.HW_GPU_MEMORY_LIMIT]
    assert min(limits) > GIB
