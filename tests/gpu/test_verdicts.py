"""What is said of trainings on a device: real ranks, hooks, journals, and the real agent."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gpu import device
from node import Labels, Node, finished, until
from otlp_receiver import Point, Receiver, attributes_of


class Look(NamedTuple):
    """What was to be seen of one scenario, in the moment in which the test had seen enough."""

    verdicts: list[dict[str, Any]]
    straggler: list[tuple[Labels, float]]
    insufficient: str


class Watched(Node):
    """The node of two ranks; the agent is the one that they start."""

    def steps(self, name: str) -> int:
        """How many both ranks have made."""
        found = [each["step"] or 0 for each in self.processes() if each["run"] == name]
        return min(found) if len(found) == 2 else 0

    def verdicts(self, name: str, *kinds: str) -> list[dict[str, Any]]:
        """Those that stand, by the file that the status reads: the ranks need the cores."""
        return [
            each
            for each in self.told().verdicts
            if each["who"]["run"] == name and (not kinds or each["kind"] in kinds)
        ]

    def was_compared(self, name: str, steps: int) -> bool:
        """After so many steps the agent has compared them, or says why it does not."""
        if self.steps(name) < steps:
            return False
        if insufficient := self.insufficient(name):
            return "of the first" not in insufficient
        return bool(self.series("training_straggler", run=name))

    def look(self, name: str) -> Look:
        if self.verdicts(name, "straggler"):
            # A scrape is of the moment before; the verdict stands while the ranks go on like that.
            metric = "training_straggler"
            until(lambda: self.series(metric, run=name, phase=""), "the series of the verdict")
        straggler = self.series("training_straggler", run=name)
        return Look(self.verdicts(name), straggler, self.insufficient(name))


def opened(
    records: Iterable[tuple[Any, dict[str, str]]], run: str, *kinds: str
) -> list[tuple[Any, dict[str, str]]]:
    """The records of verdicts of these kinds that were reached on a run."""
    return [
        (record, said)
        for record, said in records
        if (said.get("run"), said.get("verdict.state")) == (run, "opened")
        and said["verdict"] in kinds
    ]


pytestmark = [pytest.mark.timed, pytest.mark.gpu]

PROGRAM = Path(__file__).with_name("train.py")
SPEED = ("straggler", "imbalance", "recurring", "stall")
Record = Callable[[str, object], None]


class Machine(NamedTuple):
    """What the ranks train on here."""

    name: str
    env: dict[str, str]
    scale: float
    """How much longer than on our own device all takes there."""
    more: float
    """How much longer a slow kernel takes, as a share."""
    boards: int
    """Of two ranks together."""
    has_graphs: bool = True


def machine() -> Machine:
    name = os.environ.get(device.VARIABLE, "")
    if not name:
        return Machine("sim", {}, 1.0, 0.3, boards=2)
    import torch

    module = torch.get_device_module(name)
    boards, has_graphs = module.device_count(), hasattr(module, "graph")
    env = {"TORCH_NCCL_ENABLE_TIMING": "1"} if name == "cuda" else {}
    if boards > 1:
        return Machine(name, env, 3.0, 0.3, boards, has_graphs)
    if name == "cuda":
        found = ctypes.c_int()
        # The one that is loaded: torch tells the version that it was built with.
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(found))
        if found.value < 23000:
            why = f"NCCL {found.value}: two ranks on one GPU need 2.30"
            pytest.skip(why, allow_module_level=True)
        env["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    # Ranks on one board take turns of 2 ms.
    return Machine(name, env, 3.0, 0.6, boards, has_graphs)


MACHINE = machine()
if MACHINE.name == "sim":
    pytestmark.append(pytest.mark.usefixtures("device_sim"))
# A rank becomes late in this step: all that is left out of comparing at the beginning is over.
BEGINS = 40
# The program asks for its loss itself, for the last time in the last step.
ASKS = {"steps": 200, "asks_every": 40}
FAST_S = 0.006 * MACHINE.scale
# Phases so long that the moment between the program's own event and ours is no part of them.
STEADY = {"forward_s": FAST_S, "optimizer_s": 0.7 * FAST_S}
USUAL = {name: s * MACHINE.scale for name, s in (("forward_s", 0.003), ("backward_s", 0.006))}
LONG = {name: 8 * s for name, s in USUAL.items()}


class Named(NamedTuple):
    """What the verdict on the chosen rank is to say."""

    phase: str
    side: str


# Name: the verdict, what all ranks do, and what the chosen one does.
LATE: dict[str, tuple[Named, dict[str, float], dict[str, float]]] = {
    **{
        f"slow {phase}": (
            Named(phase, "device"),
            {f"{phase}_s": FAST_S},
            {f"{phase}_s": (1 + MACHINE.more) * FAST_S},
        )
        for phase in ("forward", "backward", "optimizer")
    },
    **{
        f"slow {phase}, sharded": (
            Named(phase, "device"),
            {**LONG, "spread": "fsdp2"},
            {f"{phase}_s": 1.3 * LONG[f"{phase}_s"]},
        )
        for phase in ("forward", "backward")
    },
    "late data": (Named("data", "host"), {}, {"load_s": 0.03 * MACHINE.scale}),
    "slow launches": (Named("forward", "host"), {}, {"launch_s": 0.02 * MACHINE.scale}),
}


class Even(NamedTuple):
    """Ranks of which none is to be named."""

    scenario: dict[str, Any]
    steps: int = 200
    why: str = ""
    """Why they are not compared, if they are not."""
    boards: int = 2
    """It takes so many: of two ranks that share one, one is late by turns."""


UNKNOWN_WAITS = "waiting for other ranks cannot be told from work"
EVEN = {
    "balanced": Even({}, 2_000),
    "rank 0 asks in each step": Even({"all": LONG, "first": {"asks_every": 1}}, 150),
    "sharded": Even({"all": {**LONG, "spread": "fsdp2"}}),
    # The steps before it are not replayed, and those after are.
    "captured": Even({"all": {"spread": "captured"}}, 650, UNKNOWN_WAITS, boards=1),
}
PLAYED = [
    name
    for name, each in EVEN.items()
    if each.boards <= MACHINE.boards and (MACHINE.has_graphs or name != "captured")
]
SCENARIOS: list[dict[str, Any]] = [
    {"name": "bare", "all": {**ASKS, "is_watched": False}},
    {"name": "phases", "all": {**ASKS, **STEADY}},
    *(
        {"name": name, "all": every, "chosen": own, "begins": BEGINS}
        for name, (_, every, own) in LATE.items()
    ),
    *({"name": name, **EVEN[name].scenario} for name in PLAYED),
]
# What never becomes a verdict is looked at after so many steps.
MOST_STEPS = 600


class Seen(NamedTuple):
    looks: dict[str, Look]
    records: list[tuple[Any, dict[str, str]]]
    points: list[Point]
    devices: dict[tuple[str, str], dict[str, Any]]
    """What each program saw of its own device, by scenario and rank."""

    def told(self, metric: str, by: str = "rank", **labels: str) -> dict[str, float]:
        """What was sent last of a metric, by one of its labels."""
        return {
            each.attributes[by]: each.value
            for each in self.points
            if each.metric == metric and labels.items() <= each.attributes.items()
        }

    def verdicts_of(self, name: str, *kinds: str) -> list[dict[str, Any]]:
        """Those that stood when there was enough to see."""
        return [each for each in self.looks[name].verdicts if each["kind"] in kinds]

    def said(self, run: str) -> str:
        """All that was said of it, for people."""
        return "; ".join([each["sentence"] for each in self.verdicts_of(run, *SPEED)])

    def assert_nobody_named(self, name: str) -> None:
        """And not because there was nothing to go by."""
        look = self.looks[name]
        assert look.insufficient == ""
        told = {(labels["rank"], value) for labels, value in look.straggler}
        assert told == {("0", 0.0), ("1", 0.0)}


@pytest.fixture(scope="module")
def seen() -> Seen:
    """All scenarios, one after the other, each until there was enough to see."""
    with Watched(**MACHINE.env) as node, Receiver() as receiver:
        node.export_to(receiver.start_http())

        def enough(name: str) -> bool:
            if name in LATE:
                return bool(node.verdicts(name, "straggler")) or node.was_compared(name, MOST_STEPS)
            if name in EVEN:
                each = EVEN[name]
                why = node.insufficient(name)
                logged = node.series("training_scalar_step", run=name, name="loss")
                more = min([step for _, step in logged], default=0) - each.steps
                if each.why:
                    return more >= 0 and each.why in why
                # Where cores are taken, it is unclear for a moment which host is the faster one.
                return more >= (MOST_STEPS if why else 0)
            return all((node.root / f"{name}.{rank}.device").exists() for rank in "01")

        process = node.torchrun(2, str(PROGRAM), str(node.root), json.dumps(SCENARIOS))
        looks = {}
        for name in (each["name"] for each in SCENARIOS):
            until(lambda name=name: enough(name), f"{name} to be seen")
            looks[name] = node.look(name)
            (node.root / f"{name}.enough").touch()
        finished(process)
        node.stop_agent()
        records = [(each, attributes_of(each.attributes)) for each in receiver.logs()]
        devices = {
            (name, rank): json.loads((node.root / f"{name}.{rank}.device").read_text())
            for name in looks
            for rank in "01"
        }
        return Seen(looks, records, receiver.points(), devices)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_nothing_waits_for_the_device_but_the_program(seen: Seen, rank: str) -> None:
    if MACHINE.name != "sim":
        pytest.skip("this device does not count who waits for it")
    assert seen.devices["bare", rank]["waits"] == {"item": 5}
    assert seen.devices["phases", rank]["waits"] == {"item": 5}
    # There is a question in every 50 steps of this program, whether it was seen enough.
    assert set(seen.devices["balanced", rank]["waits"]) == {"item"}


@pytest.mark.parametrize("rank", ["0", "1"])
def test_phases_of_the_device_are_right_within_2_percent(seen: Seen, rank: str) -> None:
    told = seen.told("training.phase.time", "phase", run="phases", rank=rank, clock="device")
    told["backward"] += told.pop("comm_wait")
    own = seen.devices["phases", rank]

    for phase in ("forward", "backward", "optimizer"):
        # The clock begins within the first steps.
        assert 0.98 * own["seconds_later"][phase] < told[phase] < 1.02 * own["seconds"][phase]


@pytest.mark.parametrize("name", LATE)
def test_a_late_rank_is_named_with_its_phase_and_the_side_that_is_late(
    seen: Seen, name: str, record_property: Record
) -> None:
    expected = LATE[name][0]
    record_property("expected", f"rank 1, {expected.phase}, {expected.side}")
    record_property("seen", seen.said(name))
    (verdict,) = seen.verdicts_of(name, *SPEED)
    record_property("step", verdict["step"] - BEGINS)

    assert (verdict["kind"], verdict["who"]["rank"]) == ("straggler", "1")
    assert (verdict["phase"], verdict["evidence"]["side"]) == expected
    assert verdict["evidence"]["clock"] == "device"
    assert len(opened(seen.records, name, *SPEED)) == 1


@pytest.mark.parametrize("name", [*EVEN, "phases"])
def test_of_equal_ranks_none_is_named(seen: Seen, name: str, record_property: Record) -> None:
    if name in EVEN and name not in PLAYED:
        pytest.skip("it takes a device for each rank, and graphs if captured")
    expected = EVEN.get(name, Even({}))
    record_property("expected", expected.why or "nothing")
    why = seen.looks[name].insufficient if name in EVEN else ""
    record_property("seen", seen.said(name) or why or "nothing")

    found = [record.body.string_value for record, _ in opened(seen.records, name, *SPEED)]
    if found and all("Its core is taken" in each for each in found):
        pytest.skip(f"other programs took the core of a rank, so it was late: {found}")
    assert found == []
    for rank in ("0", "1"):
        steps = seen.devices[name, rank]["steps"]
        assert seen.told("training.steps", run=name, rank=rank) == {rank: steps}
    if name not in EVEN:
        return
    if expected.why:
        assert expected.why in why
    else:
        seen.assert_nobody_named(name)


HANGS_AT = 60
KERNEL_HANGS, HOST_STAYS_AWAY = {"hangs_at": HANGS_AT}, {"stays_away_at": HANGS_AT}


def hang(chosen: dict[str, int], words: str, record_property: Record) -> dict[str, Any]:
    """The verdict where no rank goes on, with what the chosen one does in that step.

    *words*: a pattern of what the sentence says once the ranks have been asked where they are.
    """
    # A real device needs seconds for its first step.
    limit_s = "2" if MACHINE.name == "sim" else "10"
    with Node(OTEL_DDP_STALL_TIMEOUT_S=limit_s, **MACHINE.env) as node:
        scenario = {"name": "hang", "chosen": chosen}
        process = node.torchrun(2, str(PROGRAM), str(node.root), json.dumps([scenario]))

        def stalls() -> list[dict[str, Any]]:
            found = [each for each in node.told().verdicts if each["kind"] == "stall"]
            return [each for each in found if re.search(words, each["sentence"])]

        (verdict,) = until(stalls, f"a hang of which it is said: {words}")
        os.killpg(process.pid, signal.SIGKILL)
    record_property("seen", verdict["sentence"])
    return dict(verdict)


def test_a_kernel_that_never_ends_is_a_hang_of_the_device_of_its_rank(
    record_property: Record,
) -> None:
    if MACHINE.name not in ("sim", "cuda"):
        pytest.skip("nothing on this device is endless")
    record_property("expected", "a device: rank 1, backward, and where its host is")
    # Where torch times collectives, the one that the device has not come to stands between these.
    on_device = r"the device of rank 1 .*is in backward"
    # What the host has launched last, or waits for.
    on_host = r"while its host is in \w+ after step \d+ at \S+:\d+ "
    verdict = hang(KERNEL_HANGS, f"{on_device}.*{on_host}.*rank 0 waits for it", record_property)

    assert (verdict["evidence"]["cause"], verdict["evidence"]["culprits"]) == ("device", ["1"])
    assert (verdict["phase"], verdict["step"]) == ("backward", HANGS_AT - 1)


def test_a_host_that_does_not_come_to_a_collective_is_named_with_its_line(
    record_property: Record,
) -> None:
    record_property("expected", "rank 1, forward, with the line")
    source = PROGRAM.read_text().splitlines()
    line = 1 + next(at for at, each in enumerate(source) if "time.sleep(1e6)" in each)
    said = re.escape(f"{PROGRAM.name}:{line} (forward) and sleeps; rank 0 waits for it")
    verdict = hang(HOST_STAYS_AWAY, rf"rank 1 \(\S+\) is in forward.*{said}", record_property)

    assert verdict["evidence"]["culprits"] == ["1"]
    assert (verdict["phase"], verdict["step"]) == ("forward", HANGS_AT - 1)
