"""Verdicts where hosts run ahead of their devices, on real ranks: two of them and four.

The device is the stand-in of `device_standin`; hooks, journals and the agent are the real ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from node import Labels, Node, finished, until
from otlp_receiver import Receiver

pytestmark = pytest.mark.timed

TRAIN = Path(__file__).parents[1] / "device_standin" / "train.py"
SPEED = ("straggler", "imbalance", "regression", "stall")
# A step of a device, and 1 ms of waiting for the network, half of it hidden by backward.
STEP = {"forward_s": 0.003, "backward_s": 0.006, "optimizer_s": 0.001, "first_load_s": 0.1}
# The hosts are fifty steps ahead where nothing keeps them from it, and may be late by as much.
FAR_AHEAD = {"kernels": 20}
SLOWER = {"forward_s": 0.0039, "backward_s": 0.0078}
LAUNCH_QUEUE = 1024


class Named(NamedTuple):
    """What the verdict on the chosen rank is to say."""

    phase: str
    side: str


class Scenario(NamedTuple):
    """What ranks do, see `Settings` in the program, and what is to be said of it."""

    all: Mapping[str, Any]
    chosen: Mapping[str, Any]
    first: Mapping[str, Any]
    expected: Named | None


def scenario(
    expected: Named | None = None,
    *,
    every: Mapping[str, Any] | None = None,
    chosen: Mapping[str, Any] | None = None,
    first: Mapping[str, Any] | None = None,
) -> Scenario:
    """*chosen* is the rank in the middle, *first* is rank 0."""
    return Scenario({**STEP, **(every or {})}, chosen or {}, first or {}, expected)


def asks_alone(lead: int) -> Scenario:
    """Rank 0 asks for its loss every tenth step; the others are ahead by so many steps."""
    return scenario(every={"kernels": LAUNCH_QUEUE // lead}, first={"asks_every": 10})


SCENARIOS = {
    "slow device": scenario(Named("compute", "device"), every=FAR_AHEAD, chosen=SLOWER),
    # The device waits for its host at the beginning of forward: on a busy machine that takes time.
    "slow device, asked each step": scenario(
        Named("compute", "device"),
        every={"forward_s": 0.006, "backward_s": 0.012, "asks_every": 1},
        chosen={"forward_s": 0.009, "backward_s": 0.018},
    ),
    "late data": scenario(Named("data", "host"), chosen={"load_s": 0.03}),
    "slow launches": scenario(Named("forward", "host"), chosen={"launch_s": 0.02}),
    "works between steps, asked each step": scenario(
        Named("other", "host"), every={"asks_every": 1, "jitter": 0.02}, chosen={"work_s": 0.01}
    ),
    # The host needs 6 of the 11 ms that its device needs for a step.
    "late data, host ahead": scenario(chosen={"load_s": 0.006}),
    # One host happens to be ahead of the other, and its device waits for the other's. A step is so
    # long that a core that is taken for 2 ms of it is no excess.
    "all load slowly": scenario(every={"load_s": 0.06}),
    "asks alone, 5 ahead": asks_alone(5),
    "asks alone, 10 ahead": asks_alone(10),
    "no clock": scenario(chosen={**SLOWER, "has_clock": False}),
    "all launch slowly": scenario(
        every={"forward_s": 0.001, "backward_s": 0.002, "launch_s": 0.008, "asks_every": 1}
    ),
}
# What takes long, and shows more of the same, is left to `make stress`, and so are four ranks.
LONG = ("works between steps, asked each step", "asks alone, 10 ahead")
OF_TWO = tuple(name for name in SCENARIOS if name not in LONG)
OF_FOUR = tuple(name for name in SCENARIOS if name not in ("no clock", "all launch slowly"))
LATE = tuple(name for name, each in SCENARIOS.items() if each.expected)
WITH_VERDICT = (*LATE, "all launch slowly")
# What never becomes a verdict is looked at after so many steps.
STEPS = 170
# A rank becomes late in this step: all that is left out of comparing at the beginning is over.
BEGINS = 40
# From then on, most verdicts come within so many steps. All do on a machine of one's own, and in
# the simulation (test_device_cases.py); where ranks lose their cores, it takes more to be sure. A
# host beside `.item()` is looked at for 60 steps more: they show whether it waits.
SOON = 120
# A verdict that was not reached by then never comes.
MOST_STEPS = 400


class Seen(NamedTuple):
    """What was to be seen of one scenario, in the moment in which the test had seen enough."""

    verdicts: list[dict[str, Any]]
    straggler: list[tuple[Labels, float]]
    insufficient: str


class Launch:
    """Scenarios on all ranks, one after the other; the agent is the one that they started."""

    def __init__(self, world: int, names: Sequence[str]) -> None:
        self.world = world
        self.chosen = str(world // 2)
        self.seen: dict[str, Seen] = {}
        asked = [
            {
                "name": name,
                "all": each.all,
                "chosen": each.chosen,
                "first": each.first,
                "begins": BEGINS if each.expected else 0,
            }
            for name, each in ((name, SCENARIOS[name]) for name in names)
        ]
        with Node() as node, Receiver() as receiver:
            node.export_to(receiver.start_http())
            process = node.torchrun(world, str(TRAIN), str(node.root), json.dumps(asked))
            for name in names:
                until(lambda name=name: self._enough(node, name), f"{name} to be seen")
                self.seen[name] = self._look(node, name)
                (node.root / f"{name}.enough").touch()
            finished(process)
            node.stop_agent()
            self.opened = [
                said
                for said in (
                    {pair.key: pair.value.string_value for pair in each.attributes}
                    for each in receiver.logs()
                )
                if said.get("verdict.state") == "opened"
            ]

    def _enough(self, node: Node, name: str) -> bool:
        if name in WITH_VERDICT and _verdicts(node, name):
            return True
        steps = [each["step"] or 0 for each in node.processes() if each["run"] == name]
        wanted = MOST_STEPS if name in WITH_VERDICT else STEPS
        if len(steps) != self.world or min(steps) < wanted:
            return False
        # Devices are some steps behind, and steps out of the ordinary are not compared.
        if insufficient := node.insufficient(name):
            return "of the first" not in insufficient
        return bool(node.series("training_straggler", run=name))

    def _look(self, node: Node, name: str) -> Seen:
        if name in LATE and _verdicts(node, name):
            # A scrape is of the moment before; the verdict stands while the ranks go on like that.
            metric = "training_straggler"
            until(lambda: node.series(metric, run=name, phase=""), "the series of the verdict")
        return Seen(
            _verdicts(node, name),
            node.series("training_straggler", run=name),
            node.insufficient(name),
        )

    def kinds(self, name: str) -> set[str]:
        """The kinds of all verdicts that were ever reached on a run."""
        return {said["verdict"] for said in self.opened if said.get("run") == name}


def _verdicts(node: Node, name: str) -> list[dict[str, Any]]:
    return [each for each in node.agent()["verdicts"] if each["who"]["run"] == name]


@pytest.fixture(scope="module")
def of_two() -> Launch:
    return Launch(2, OF_TWO)


@pytest.fixture(scope="module")
def of_four() -> Launch:
    return Launch(4, OF_FOUR)


@pytest.fixture(scope="module")
def long_of_two() -> Launch:
    return Launch(2, LONG)


@pytest.fixture
def launch(world: int, name: str, request: pytest.FixtureRequest) -> Launch:
    of = "of_four" if world == 4 else "long_of_two" if name in LONG else "of_two"
    found: Launch = request.getfixturevalue(of)
    return found


def on_two_and_on_four(*names: str) -> pytest.MarkDecorator:
    """For each of these scenarios with two ranks, and by `make stress` with four."""
    return pytest.mark.parametrize(
        ("name", "world"),
        [
            pytest.param(name, world, id=f"{name} on {world} ranks", marks=marks)
            for world, tried, marks in (
                (2, OF_TWO, ()),
                (2, LONG, pytest.mark.stress),
                (4, OF_FOUR, pytest.mark.stress),
            )
            for name in names
            if name in tried
        ],
    )


@on_two_and_on_four(*LATE)
def test_a_late_rank_is_named_with_its_phase_and_the_side_that_is_late(
    launch: Launch, name: str
) -> None:
    expected = SCENARIOS[name].expected
    assert expected is not None
    seen = launch.seen[name]
    (verdict,) = [each for each in seen.verdicts if each["kind"] in SPEED]

    assert (verdict["kind"], verdict["who"]["rank"]) == ("straggler", launch.chosen)
    assert verdict["phase"] == expected.phase
    assert (verdict["evidence"]["clock"], verdict["evidence"]["side"]) == ("device", expected.side)
    late = [labels for labels, value in seen.straggler if value]
    assert [(each["rank"], each["phase"], each["side"]) for each in late] == [
        (launch.chosen, *expected)
    ]
    assert launch.kinds(name) & set(SPEED) == {"straggler"}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.stress)])
def test_most_ranks_that_become_late_are_named_within_120_steps(
    world: int, request: pytest.FixtureRequest
) -> None:
    launch: Launch = request.getfixturevalue("of_four" if world == 4 else "of_two")
    verdicts = [launch.seen[name].verdicts for name in LATE if name not in LONG]

    took = sorted([each["step"] - BEGINS for (each,) in verdicts])
    assert took[len(took) // 2] <= SOON, took


@on_two_and_on_four(
    "late data, host ahead",
    "all load slowly",
    *(each for each in SCENARIOS if each.startswith("asks alone")),
)
def test_of_hosts_that_only_differ_in_how_far_they_are_ahead_none_is_named(
    launch: Launch, name: str
) -> None:
    seen = launch.seen[name]

    assert seen.insufficient == ""
    told = {(labels["rank"], value) for labels, value in seen.straggler}
    assert told == {(str(rank), 0.0) for rank in range(launch.world)}
    assert launch.kinds(name) & set(SPEED) == set()


def test_without_the_clock_of_one_device_it_is_said_that_nothing_can_be_said(
    of_two: Launch,
) -> None:
    seen = of_two.seen["no clock"]

    assert seen.insufficient == (
        "insufficient data: the waits are on the device, whose clock is not known on rank 1"
    )
    assert seen.straggler == []
    assert of_two.kinds("no clock") & set(SPEED) == set()


def test_where_all_ranks_launch_slowly_the_run_is_launch_bound_and_none_is_named(
    of_two: Launch,
) -> None:
    (verdict,) = of_two.seen["all launch slowly"].verdicts

    assert (verdict["kind"], verdict["phase"]) == ("bound", "launch")
    assert verdict["sentence"].startswith("launch-bound: ")
    assert of_two.kinds("all launch slowly") == {"bound"}
