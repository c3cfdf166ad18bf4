"""Intel's devices: over a tree of the files that the kernel's driver xe shows."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from intel_boards import ADDRESS, UUID, IntelBoard
from otel_ddp.agent.ledger import Labels
from otel_ddp.agent.node.gpu.driver import NothingHere, User
from otel_ddp.agent.node.gpu.owners import owners
from otel_ddp.agent.node.gpu.polling import DeviceSample, Gpus
from otel_ddp.agent.reading.journals import Rank

FDINFO = """pos:\t0
drm-driver:\txe
drm-client-id:\t3
drm-pdev:\t0000:03:00.0
drm-total-vram0:\t23992 KiB
drm-resident-gtt:\t192 KiB
drm-resident-vram0:\t3 MiB
"""


class Card(IntelBoard):
    """With processes that have it open."""

    def hold(self, pid: int, fdinfo: str, name: str = "5", board: str = "renderD128") -> None:
        """A process that has the board open."""
        self.put(f"proc/{pid}/fdinfo/{name}", fdinfo)
        (self.root / f"proc/{pid}/fd").mkdir(exist_ok=True)
        os.symlink(f"/dev/dri/{board}", self.root / f"proc/{pid}/fd/{name}")


@pytest.fixture
def card(tmp_path: Path) -> Card:
    return Card(tmp_path)


def test_a_board_answers_under_the_names_and_in_the_units_of_all_vendors(card: Card) -> None:
    gpus = Gpus([card.driver()])

    first = gpus.read(0)
    card.now += 2.0
    card.spend(305)
    (sample,) = gpus.read(2 * 10**9).devices

    assert gpus.errors == 0
    assert first.devices[0].device == sample.device
    found = {(e.metric.name, e.attributes[4:]): e.value for e in sample.measurements}
    assert found == {
        ("hw.temperature", (("hw.sensor_location", "core"),)): 61,
        ("hw.temperature", (("hw.sensor_location", "memory"),)): 70,
        ("hw.energy", ()): 5,
        ("hw.power", ()): 150,
        ("otel_ddp.gpu.power.limit", ()): 190,
        ("otel_ddp.gpu.clock.frequency", (("domain", "core"),)): 2.4e9,
    }
    assert (sample.device.name, sample.device.pci) == ("Intel GPU e20b", ADDRESS)


def test_there_is_no_power_before_two_readings_nor_where_its_energy_began_anew(card: Card) -> None:
    driver = card.driver()
    driver.open()
    (device,) = driver.devices()
    (power,) = [each for each in driver.questions(device) if each.name == "hw.power"]

    once = list(power.ask())
    card.now += 1.0
    card.spend(0)

    assert (once, list(power.ask())) == ([], [])


def test_a_rank_finds_its_board_by_the_uuid_of_level_zero(card: Card) -> None:
    driver = card.driver()
    driver.open()
    devices = [DeviceSample(each, (), ()) for each in driver.devices()]
    labels: Labels = (("run", "r"), ("node", "n"), ("rank", "0"))

    found = owners([Rank(labels, 7, 0, {"boards": [{"uuid": UUID}]})], devices, "n").labels

    assert found == {UUID: labels}


def test_a_process_is_seen_where_it_holds_memory_and_each_client_counts_once(card: Card) -> None:
    for name in ("5", "6"):
        card.hold(70, FDINFO, name)
    elsewhere = FDINFO.replace("id:\t3", "id:\t4").replace("03:00", "04:00")
    card.hold(70, elsewhere, "7", "renderD129")
    card.put("proc/70/fdinfo/8", FDINFO.replace("id:\t3", "id:\t5"))
    os.symlink("/tmp/other", card.root / "proc/70/fd/8")
    driver = card.driver()
    driver.open()
    (device,) = driver.devices()

    assert driver.users(device) == [User(70, 3 << 20)]


def test_a_look_at_all_processes_takes_a_hundredth_of_a_core_at_most(card: Card) -> None:
    times = iter([100.0, 100.05, 104.9, 105.0, 105.05])
    driver = card.driver(lambda: next(times))
    driver.open()
    (device,) = driver.devices()
    card.hold(70, FDINFO)

    assert len(driver.users(device)) == 1
    card.hold(71, FDINFO)
    assert len(driver.users(device)) == 1
    assert len(driver.users(device)) == 2


def test_a_processors_own_graphics_are_no_board(card: Card) -> None:
    (card.root / card.folder).rename(card.root / "gone")

    with pytest.raises(NothingHere, match="no Intel GPU to read here"):
        card.driver().open()
