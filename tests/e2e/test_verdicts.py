"""Verdicts on how fast ranks are, on real ranks through the real agent."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from node import without_figures
from watched import Watched, assert_nobody_named, opened

pytestmark = pytest.mark.timed

LATE_S = 0.03
WORK = {"data", "forward", "backward", "optimizer", "other"}
LABELS = {"group", "run", "job_type", "node", "rank", "local_rank"}
SLOW = {"all": {"work_s": 0.006}}
# A scenario -> what ranks do, see `Settings` in the program; and the phase to be named for. That of
# other phases the simulation shows: tools/diagnosis_cases.py.
LATE: dict[str, tuple[dict[str, Any], str]] = {
    "backward": ({"chosen": {"backward_s": LATE_S}}, "backward"),
    "compiled": ({"all": {"compiled": True}, "chosen": {"backward_s": LATE_S}}, "backward"),
    # What waits for them is no work either.
    "behind buffers": ({"all": {"buffers": True}, "chosen": {"data_s": LATE_S}}, "data"),
    "slower": ({"all": {"work_s": 0.01}, "chosen": {"work_s": 0.014}}, "compute"),
}
SILENT: dict[str, tuple[dict[str, Any], str]] = {
    "balanced": ({"all": {"work_s": 0.01}}, ""),
    "saves": (
        {"chosen": {"checkpoint_s": LATE_S}},
        "most steps compile, save, evaluate, are skipped, or collect garbage",
    ),
    "own layer": (
        {"all": {"own_layer": True}, "chosen": {"forward_s": LATE_S}},
        "collectives of your own in `forward`, `backward`: a rank that is late there cannot be "
        "named",
    ),
    # FSDP2 waits inside forward and backward, and only NCCL tells for how long.
    "sharded": (
        {"all": {"sharded": True}, "chosen": {"forward_s": LATE_S}},
        "waiting for other ranks cannot be told from work on rank 0, 1",
    ),
}
# What a rank does again and again; the phase, and what it follows.
AGAIN: dict[str, tuple[dict[str, Any], str, str]] = {
    "loads": ({"chosen": {"stalls_every": 20}}, "data", ""),
    "collects": ({"all": {"collects_every": 6}, "chosen": {"collects_every": 3}}, "garbage", ""),
    "evaluates": ({"all": {"evaluates": True}, "chosen": {"evaluated_s": 0.04}}, "other", "eval"),
}
UNEQUAL = {"name": "unequal", **SLOW, "chosen": {"samples": 8, "work_s": 0.012}}
SILENT_STEPS = 160
OF_RANKS = ("straggler", "imbalance", "recurring")
SPEED = (*OF_RANKS, "regression", "stall")


class Played(NamedTuple):
    """All scenarios, and what was sent of them."""

    watched: Watched
    records: list[tuple[Any, dict[str, str]]]


def again(name: str, verdicts: list[dict[str, Any]], chosen: str) -> list[dict[str, Any]]:
    """The verdicts that say it as it is: stalls of the machine may join the first ones."""
    _, phase, after = AGAIN[name]
    return [
        each
        for each in verdicts
        if (each["kind"], each["who"]["rank"], each["phase"]) == ("recurring", chosen, phase)
        and each["evidence"].get("recurs_after", "") == after
    ]


@pytest.fixture(scope="module")
def played() -> Played:
    told = [{"name": name, **did} for name, (did, *_) in {**LATE, **SILENT, **AGAIN}.items()]
    with Watched() as watched:

        def enough(name: str) -> bool:
            if name in SILENT:
                return watched.was_compared(name, SILENT_STEPS)
            verdicts = watched.verdicts(name, *OF_RANKS)
            if name in AGAIN:
                return bool(again(name, verdicts, watched.chosen))
            return bool(verdicts)

        watched.play([*told, UNEQUAL], enough)
        return Played(watched, watched.records())


@pytest.mark.parametrize("name", LATE)
def test_a_rank_that_is_late_is_named_with_the_phase_it_is_late_in(
    played: Played, name: str
) -> None:
    seen, chosen, phase = played.watched.seen[name], played.watched.chosen, LATE[name][1]
    (verdict,) = [each for each in seen.verdicts if each["kind"] in OF_RANKS]
    assert (verdict["kind"], verdict["who"]["rank"]) == ("straggler", chosen)
    assert verdict["phase"] == phase
    assert verdict["sentence"].startswith(f"rank {chosen} (")
    assert seen.named == [(chosen, phase)]

    ((record, said),) = opened(played.records, name, "straggler", "imbalance")
    assert (record.severity_text, record.event_name) == ("WARN", "training.straggler")
    assert without_figures(record.body.string_value) == without_figures(verdict["sentence"])
    assert {key: said[key] for key in LABELS} == {key: verdict["who"][key] for key in LABELS}
    assert said["phase"] == phase


@pytest.mark.parametrize("name", SILENT)
def test_where_nobody_is_late_or_nothing_can_be_said_nobody_is_named(
    played: Played, name: str
) -> None:
    why = SILENT[name][1]
    if why:
        assert played.watched.seen[name].insufficient == f"insufficient data: {why}"
    else:
        assert_nobody_named(played.watched, name)
    assert opened(played.records, name, *SPEED) == []


@pytest.mark.parametrize("name", AGAIN)
def test_a_rank_that_stalls_again_and_again_is_named_with_what_it_follows(
    played: Played, name: str
) -> None:
    (verdict,) = again(name, played.watched.verdicts_of(name, *OF_RANKS), played.watched.chosen)

    if name == "loads":
        evidence = verdict["evidence"]
        # A stall that the machine adds counts as well: of ten or so it makes eleven.
        assert evidence["recurs_every"] == pytest.approx(20, rel=0.2)
        assert evidence["stall_s"] == pytest.approx(0.3, rel=0.2)
    assert {said["verdict"] for _, said in opened(played.records, name, *SPEED)} == {"recurring"}


def test_a_rank_with_twice_the_work_is_no_straggler(played: Played) -> None:
    (verdict,) = played.watched.verdicts_of("unequal", *OF_RANKS)
    assert (verdict["kind"], verdict["who"]["rank"]) == ("imbalance", played.watched.chosen)
    assert verdict["evidence"]["more_to_do"] == 1.0
    assert played.watched.seen["unequal"].named == []
    told = opened(played.records, "unequal", "straggler", "imbalance")
    assert [said["verdict"] for _, said in told] == ["imbalance"]
