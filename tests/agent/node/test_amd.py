"""AMD's devices: over a tree of the files that the kernel's driver amdgpu shows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from amd_boards import GIB, AmdBoard, AmdBoards, mi300x, radeon
from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.node.gpu.amd import Amd
from otel_ddp.agent.node.gpu.driver import DeviceLost, DriverMissing, NothingHere, User
from otel_ddp.agent.node.gpu.drivers import known, opened
from otel_ddp.agent.node.gpu.owners import owners
from otel_ddp.agent.node.gpu.polling import DeviceSample, Gpus
from otel_ddp.agent.reading.journals import Rank

BOOT_NS = 1_700_000_000 * 10**9
# What hipGetDeviceProperties has as 16 bytes is the text of the board's number, and torch writes
# any 16 bytes as a UUID.
FIRST_TO_TORCH = "31656534-3166-3765-3061-353263393362"


@pytest.fixture
def boards(tmp_path: Path) -> AmdBoards:
    return AmdBoards(tmp_path)


def amd(boards: AmdBoards) -> Amd:
    return Amd(sys=boards.sys, dev=boards.dev, boot_ns=lambda: BOOT_NS)


def numbers(boards: AmdBoards, *shown: AmdBoard) -> tuple[dict[str, float], DeviceSample]:
    """What the first board says, by metric and last attribute."""
    boards.write(shown)
    gpus = Gpus([amd(boards)])
    sample = gpus.read(0).devices[0]
    assert gpus.errors == 0
    own = {"hw.id", "hw.type", "hw.model", "gpu"}
    found = {}
    for each in sample.measurements:
        words = [value for key, value in each.attributes if key not in own]
        found[" ".join([each.metric.name, *words])] = each.value
        assert each.start_ns == (BOOT_NS if each.metric.kind == "counter" else 0)
    return found, sample


def test_a_board_answers_under_the_names_and_in_the_units_of_all_vendors(boards: AmdBoards) -> None:
    found, (device, _, _) = numbers(boards, mi300x(), mi300x(1))

    assert found == {
        "hw.gpu.utilization general": 0.87,
        "otel_ddp.gpu.mem_controller.utilization": 0.41,
        "hw.gpu.memory.usage": 60 * GIB,
        "hw.gpu.memory.limit": 192 * GIB,
        "hw.temperature core": 64,
        "hw.temperature memory": 71,
        "hw.power": 682,
        "otel_ddp.gpu.power.limit": 750,
        "otel_ddp.gpu.clock.frequency core": 2.1e9,
        "otel_ddp.gpu.clock.frequency memory": 1.3e9,
        "hw.errors corrected": 12,
        "hw.errors uncorrected": 1,
        "otel_ddp.gpu.pcie.replays 0000:2b:00.0": 2,
    }
    assert (device.index, device.name) == ("0", "AMD Instinct MI300X OAM")
    assert (device.uuid, device.pci) == ("GPU-1ee41f7e0a52c93b", "0000:2b:00.0")


def test_what_a_board_lacks_is_absent(boards: AmdBoards) -> None:
    found, (device, _, _) = numbers(boards, radeon())

    assert found["hw.temperature core"] == 48
    assert found["hw.power"] == 220
    assert found["hw.fan.speed_ratio 0"] == 0.2
    # No limit is not a limit of 0.
    assert not {"otel_ddp.gpu.power.limit", "hw.errors corrected"} & found.keys()
    assert (device.uuid, device.name) == ("0000:2b:00.0", "AMD GPU 744c")


@pytest.mark.parametrize(
    "declared",
    [
        {"uuid": FIRST_TO_TORCH},
        {"uuid": "", "pci": "0000:2b:00.0"},
        # Of a virtual machine that gives its boards other numbers.
        {"uuid": "30303030-3030-3030-3030-303030303030", "pci": "0000:2b:00.0"},
    ],
)
def test_a_rank_finds_its_board_by_what_torch_tells_of_it(
    boards: AmdBoards, declared: dict[str, str]
) -> None:
    boards.write([mi300x(), mi300x(1)])
    driver = amd(boards)
    driver.open()
    devices = [DeviceSample(each, (), ()) for each in driver.devices()]
    labels: Labels = (("run", "r"), ("node", "n"), ("rank", "0"))

    found = owners([Rank(labels, 7, 0, {"boards": [declared]})], devices, "n").labels

    assert found == {"GPU-1ee41f7e0a52c93b": labels, "GPU-2ee41f7e0a52c93b": (("node", "n"),)}


def test_a_process_is_seen_where_it_holds_memory(boards: AmdBoards) -> None:
    first, second = mi300x(), mi300x(1)
    first.processes, second.processes = {70: 0, 71: GIB}, {70: 3 * GIB}
    boards.write([first, second])
    driver = amd(boards)
    driver.open()

    users = [driver.users(each) for each in driver.devices()]

    assert users == [[User(71, GIB)], [User(70, 3 * GIB)]]


def test_a_container_has_the_boards_that_it_was_given(boards: AmdBoards) -> None:
    mine, others = mi300x(1), mi300x()
    others.given = False
    boards.write([others])

    with pytest.raises(DriverMissing, match="given none") as why:
        opened([amd(boards)])
    assert not isinstance(why.value, NothingHere)

    boards.write([others, mine])
    driver = amd(boards)
    driver.open()
    assert [each.uuid for each in driver.devices()] == ["GPU-2ee41f7e0a52c93b"]


def test_a_machine_without_such_boards_says_what_was_looked_for(boards: AmdBoards) -> None:
    with pytest.raises(NothingHere, match=r"no AMD GPU to read here \(kernel driver amdgpu\)"):
        opened([amd(boards)])
    assert Amd in map(type, known())


def test_a_board_that_is_taken_away_is_lost_and_the_others_go_on(boards: AmdBoards) -> None:
    boards.write([mi300x(), mi300x(1)])
    driver = amd(boards)
    driver.open()
    first, second = driver.devices()
    question, *_ = driver.questions(first)
    still, *_ = driver.questions(second)

    shutil.rmtree(boards.sys / "bus/pci/drivers/amdgpu" / first.pci)

    with pytest.raises(DeviceLost):
        question.ask()
    assert [each.value for each in still.ask()] == [0.87]
    assert driver.devices() == (type(second)(second.uuid, "0", second.name, second.pci),)
