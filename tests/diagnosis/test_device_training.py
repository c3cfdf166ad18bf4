"""The simulator behind the table of device cases: hosts, streams, collectives."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tools.device_training.rank import MS
from tools.device_training.setting import Setting, Trouble
from tools.device_training.training import Piece, WordStream, trained

from otel_ddp.agent.reading.steps import Step, StepStream
from otel_ddp.vocabulary.words import PHASES

STEPS = 60
SETTINGS = {
    "host ahead": Setting(3, jitter=0.1),
    "all synchronise": Setting(3, jitter=0.1, item_every=1),
    "accumulation": Setting(3, jitter=0.1, accumulation=3),
    "sharded": Setting(3, jitter=0.1, sharded=True),
    "slow to launch": Setting(3, jitter=0.1, launch_ms=120),
    "slow to load": Setting(3, jitter=0.1, load_ms=130, prefetch=4),
    "disturbed": Setting(3, jitter=0.1, disturbances=True),
    "a hundred steps ahead": Setting(3, jitter=0.1, layers=4, kernels=10),
}
EVERY_SETTING = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())


def took_ms(setting: Setting, troubles: tuple[Trouble, ...] = ()) -> float:
    """A step's duration by the device, once the training has found its pace."""
    steps = list(trained(setting, STEPS, troubles))
    ends_ns = [pieces[0].marks[-1].device_ns for pieces in (steps[STEPS // 2], steps[-1])]
    return (ends_ns[1] - ends_ns[0]) / (STEPS - 1 - STEPS // 2) / MS


def read(pieces: list[Piece], kind: str) -> list[Step]:
    stream, words = StepStream(0), WordStream(on_device=kind == "device")
    records = [words.record(each) for piece in pieces if (each := getattr(piece, kind))]
    return [step for record in records for step in stream.feed(record)]


@EVERY_SETTING
def test_a_collective_ends_on_all_ranks_at_one_time(setting: Setting) -> None:
    for pieces in trained(setting, STEPS):
        for same in zip(*[piece.collectives for piece in pieces], strict=True):
            assert len({(each.group, each.number, each.op) for each in same}) == 1
            assert len({each.started_ns + each.duration_ns for each in same}) == 1
            assert all(each.started_ns >= each.enqueued_ns for each in same)


def test_a_collective_takes_its_transfer_alone_on_the_rank_that_comes_last() -> None:
    late = Trouble(1, "device", 0.3)

    for pieces in trained(Setting(3), STEPS, (late,)):
        for same in zip(*[piece.collectives for piece in pieces], strict=True):
            last = max(same, key=lambda each: each.started_ns)
            assert last.duration_ns == 2 * MS
            assert last is same[1] or last.started_ns == same[1].started_ns


@EVERY_SETTING
def test_the_words_of_a_device_say_how_long_it_took_from_mark_to_mark(setting: Setting) -> None:
    ranks = list(zip(*trained(setting, STEPS), strict=True))

    for pieces in ranks:
        for step in read(pieces, "device"):
            marks = pieces[(step.number or 0) - 1].marks
            took_ns = dict.fromkeys(PHASES.values(), 0)
            for before, after in pairwise(marks):
                took_ns[before.code] += after.device_ns - before.device_ns
            for code, each_ns in took_ns.items():
                assert step.seconds(code) == pytest.approx(each_ns / 1e9, rel=1e-4, abs=1e-6)


TROUBLES = {
    "slow device": (Setting(), Trouble(1, "device", 0.3), 26, 28),
    "loader late, device runs dry": (Setting(), Trouble(1, "loader", 90), 40, 60),
    "loader late, host ahead": (Setting(), Trouble(1, "loader", 30), 0, 0.1),
    "slow in launching": (Setting(), Trouble(1, "cores", 2.0), 30, 50),
    "synchronises alone, host ahead": (Setting(), Trouble(1, "item", 10), 0, 2),
    "sharded": (Setting(sharded=True), Trouble(1, "device", 0.3), 20, 30),
}


@pytest.mark.parametrize(
    ("setting", "trouble", "least_ms", "most_ms"), TROUBLES.values(), ids=TROUBLES.keys()
)
def test_a_step_is_shorter_by_what_a_trouble_costs_once_it_is_taken_away(
    setting: Setting, trouble: Trouble, least_ms: float, most_ms: float
) -> None:
    shorter_ms = took_ms(setting, (trouble,)) - took_ms(setting)

    assert least_ms <= shorter_ms <= most_ms
