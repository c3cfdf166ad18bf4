"""Stragglers, and silence, on real ranks through the real agent: two of them and four."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest

from node import Labels, Node, finished, until, without_figures
from otel_ddp.agent.reading.node_status import survey
from otlp_receiver import Receiver

pytestmark = pytest.mark.timed

LATE_S = 0.03
WORK = {"data", "forward", "backward", "optimizer", "other"}
LABELS = {"group", "run", "job_type", "node", "rank", "local_rank"}
# What is late where, and the phase that it is to be named for.
LATE = {"data": "data", "forward": "forward", "backward": "backward", "other": "other"}
# With buffers that DDP sends before each forward: what waits for them is no work either.
BUFFERS = "batchnorm"
# What is seen where the steps end, as there is never a verdict to wait for.
SILENT = ("balanced", "together", "checkpoint", "evens_out", "own_layer")
# Without end each, until the test has seen enough of them: on two ranks, on four, and what four
# ranks show as two do.
OF_TWO = (
    *LATE, BUFFERS, "again", "checkpoint", "balanced", "together", "evens_out", "own_layer"
)  # fmt: skip
OF_FOUR = ("data", "balanced", "slower", "unequal")
REST_OF_FOUR = ("forward", "backward", "other", BUFFERS, "together")
BALANCED_STEPS = {2: 250, 4: 200}
SLOW_FROM, SLOW_STEPS = 140, 130
# A verdict would be there by then.
SILENT_STEPS = 160
OF_RANKS = ("straggler", "imbalance", "recurring")
SPEED = (*OF_RANKS, "regression", "stall")

TRAIN = """
import os, random, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

LATE_S, SLOW_FROM = 0.03, 140
folder, names = sys.argv[1], sys.argv[2].split(",")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
chosen = rank == world // 2


class Pause(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, forward_s, backward_s):
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.backward_s)
        return gradient, None, None


class Average(torch.autograd.Function):
    # What detectron2's synchronised batch norm does: it waits in forward and in backward.
    @staticmethod
    def forward(ctx, value):
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.only, self.forward_s, self.backward_s = nn.Linear(8, 1), 0.0, 0.0
        self.norm = nn.BatchNorm1d(8) if name == "batchnorm" else nn.Identity()

    def forward(self, inputs):
        inputs = self.norm(inputs)
        output = Pause.apply(self.only(inputs), self.forward_s, self.backward_s)
        return Average.apply(output) if name == "own_layer" else output


def stops_at(name):
    # The first rank finds that the test wants it, and writes down the step before all ranks have
    # synchronised on the one before: they all see it in time.
    try:
        with open(f"{folder}/{name}.stops_at") as file:
            return int(file.read())
    except FileNotFoundError:
        return None


def batches(name, net):
    # Of steps of a millisecond, what a machine makes of equal ranks is a large part.
    work_s = {"slower": 0.006, "unequal": 0.006, "balanced": 0.01}.get(name, 0.001)
    step = 0
    while (last := stops_at(name)) is None or step < last:
        if last is None and rank == 0 and os.path.exists(f"{folder}/{name}.enough"):
            with open(f"{folder}/{name}.new", "w") as file:
                file.write(str(step + 2))
            os.rename(file.name, f"{folder}/{name}.stops_at")
        size, factor = 4, 1.0
        if name == "unequal" and chosen:
            size, factor = 8, 2.0
        if name == "slower" and chosen:
            factor = 1.2
        if name == "together" and step >= SLOW_FROM:
            factor = 3.0
        net.forward_s = net.backward_s = work_s * factor
        if chosen and name in ("forward", "own_layer"):
            net.forward_s += LATE_S
        if chosen and name == "backward":
            net.backward_s += LATE_S
        if chosen and name in ("data", "batchnorm"):
            time.sleep(LATE_S)
        if name == "evens_out" and chosen != (random.Random(step).random() < 0.2):
            # Late in four of five steps, and then the other one is, by as much as in all four.
            time.sleep(0.005 if chosen else 0.024)
        if name == "again" and chosen and step % 20 == 19:
            time.sleep(0.3)
        yield torch.randn(size, 8)
        step += 1


for name in names:
    net = Net()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = otel_ddp.instrument(model, group="g", run=name)
    for batch in otel_ddp.data(batches(name, net)):
        model(batch).sum().backward()
        if chosen and name == "other":
            time.sleep(LATE_S)
        if chosen and name == "checkpoint":
            with run.phase("checkpoint"):
                time.sleep(LATE_S)
        optimizer.step()
        optimizer.zero_grad()
    run.finish()
dist.destroy_process_group()
"""


class Seen(NamedTuple):
    """What was to be seen of one scenario, in the moment in which the test had seen enough."""

    verdicts: list[dict[str, Any]]
    straggler: list[tuple[Labels, float]]
    excess: list[tuple[Labels, float]]
    imbalance: list[tuple[Labels, float]]
    recurring: list[tuple[Labels, float]]
    insufficient: str

    @property
    def named(self) -> list[tuple[str, str]]:
        return [(labels["rank"], labels["phase"]) for labels, value in self.straggler if value]


class Launch:
    """All scenarios on all ranks, one after the other; the agent is the one that they started."""

    def __init__(self, world: int, names: Sequence[str]) -> None:
        self.world = world
        self.chosen = str(world // 2)
        self.seen: dict[str, Seen] = {}
        with Node() as node, Receiver() as receiver:
            node.export_to(receiver.start_http())
            script = node.root / "train.py"
            script.write_text(TRAIN)
            process = node.torchrun(*(world, str(script), str(node.root), ",".join(names)))
            for name in names:
                until(lambda name=name: self._enough(node, name), f"{name} to be seen")
                self.seen[name] = self._look(node, name)
                (node.root / f"{name}.enough").touch()
            finished(process)
            # It sends what it has not sent.
            node.stop_agent()
            self.records = [
                (each, {pair.key: pair.value.string_value for pair in each.attributes})
                for each in receiver.logs()
            ]

    def _enough(self, node: Node, name: str) -> bool:
        if name not in SILENT:
            # The file that the status reads, and no journals: the ranks need the cores.
            found = node.agent()["verdicts"]
            return any(each["who"]["run"] == name and each["kind"] in OF_RANKS for each in found)
        steps = [each["step"] or 0 for each in node.processes() if each["run"] == name]
        wanted = {
            "balanced": BALANCED_STEPS[self.world],
            "together": SLOW_FROM + SLOW_STEPS,
        }.get(name, SILENT_STEPS)
        if len(steps) != self.world or min(steps) < wanted:
            return False
        # The agent reads them a moment later: it has compared them, or says why it does not.
        insufficient = node.insufficient(name)
        if insufficient:
            return "of the first" not in insufficient
        return bool(node.series("training_straggler", run=name))

    def _look(self, node: Node, name: str) -> Seen:
        if name not in SILENT:
            # A scrape is of the moment before; the verdict stands while the ranks go on like that.
            metric = "training_straggler"
            until(lambda: node.series(metric, run=name, phase=""), "the series of the verdict")
        verdicts = [each for each in _verdicts(node) if each["who"]["run"] == name]
        return Seen(
            verdicts,
            node.series("training_straggler", run=name),
            node.series("training_straggler_excess_ratio", run=name),
            node.series("training_imbalance", run=name),
            node.series("training_recurring_stall", run=name),
            node.insufficient(name),
        )

    def opened(self, run: str, kinds: Iterable[str]) -> list[tuple[Any, dict[str, str]]]:
        """The log records of verdicts of these kinds that were reached on a run."""
        return [
            (record, said)
            for record, said in self.records
            if (said.get("run"), said.get("verdict.state")) == (run, "opened")
            and said["verdict"] in kinds
        ]


def _verdicts(node: Node) -> list[dict[str, Any]]:
    found = survey([node.place]).verdicts
    return [each for each in found if each["kind"] in OF_RANKS]


@pytest.fixture(scope="module")
def of_two() -> Launch:
    return Launch(2, OF_TWO)


@pytest.fixture(scope="module")
def of_four() -> Launch:
    return Launch(4, OF_FOUR)


@pytest.fixture(scope="module")
def rest_of_four() -> Launch:
    return Launch(4, REST_OF_FOUR)


def on_two_and_on_four(*names: str) -> pytest.MarkDecorator:
    """For each of these scenarios, with two ranks and with four."""
    return pytest.mark.parametrize(
        ("where", "world"),
        [
            pytest.param(
                *(name, world),
                id=f"{name} on {world} ranks",
                marks=[pytest.mark.stress] if world == 4 and name in REST_OF_FOUR else [],
            )
            for world in (2, 4)
            for name in names
        ],
    )


@pytest.fixture
def launch(where: str, world: int, request: pytest.FixtureRequest) -> Launch:
    name = "of_two" if world == 2 else "of_four" if where in OF_FOUR else "rest_of_four"
    found: Launch = request.getfixturevalue(name)
    return found


def assert_named(launch: Launch, name: str, phase: str) -> None:
    """This rank and this phase, in everything that a user may look at, and nothing else."""
    seen = launch.seen[name]
    (verdict,) = seen.verdicts
    assert (verdict["kind"], verdict["who"]["rank"]) == ("straggler", launch.chosen)
    assert verdict["phase"] == phase
    assert verdict["sentence"].startswith(f"rank {launch.chosen} (")
    assert seen.named == [(launch.chosen, phase)]

    ((record, said),) = launch.opened(name, ["straggler", "imbalance"])
    assert (record.severity_text, record.event_name) == ("WARN", "training.straggler")
    assert without_figures(record.body.string_value) == without_figures(verdict["sentence"])
    assert {key: said[key] for key in LABELS} == {key: verdict["who"][key] for key in LABELS}
    assert said["phase"] == phase


@on_two_and_on_four(*LATE)
def test_a_rank_that_is_late_is_named_with_the_phase_it_is_late_in(
    launch: Launch, where: str
) -> None:
    phase = LATE[where]
    assert_named(launch, where, phase)

    excess = {
        labels["phase"]: value
        for labels, value in launch.seen[where].excess
        if labels["rank"] == launch.chosen
    }
    assert max(WORK & excess.keys(), key=lambda word: excess[word]) == phase


def test_a_rank_that_computes_a_fifth_slower_is_named_for_computing(of_four: Launch) -> None:
    assert_named(of_four, "slower", "compute")


@on_two_and_on_four("balanced")
def test_of_balanced_ranks_nobody_is_named(launch: Launch) -> None:
    assert_silent(launch, "balanced")


@on_two_and_on_four("together")
def test_of_ranks_that_are_slow_together_nobody_is_named(launch: Launch) -> None:
    assert_silent(launch, "together")


def test_a_loader_that_stalls_in_every_20th_batch_is_named_with_its_cost(of_two: Launch) -> None:
    seen = of_two.seen["again"]
    (verdict,) = seen.verdicts
    who = verdict["who"]["rank"], verdict["phase"]
    assert (verdict["kind"], *who) == ("recurring", of_two.chosen, "data")
    # A stall that the machine adds counts as well: of ten or so it makes eleven.
    assert verdict["evidence"]["recurs_every"] == pytest.approx(20, abs=4)
    assert verdict["evidence"]["stall_s"] == pytest.approx(0.3, rel=0.2)
    assert re.search(r"stalls in data about every (1[6-9]|2[0-4]) steps", verdict["sentence"])
    ((labels, value),) = seen.recurring
    assert (labels["rank"], labels["phase"], value) == (*who, 1.0)
    assert [said["verdict"] for _, said in of_two.opened("again", SPEED)] == ["recurring"]


def test_of_a_rank_that_makes_up_for_its_late_steps_nobody_is_named(of_two: Launch) -> None:
    assert_silent(of_two, "evens_out")


@on_two_and_on_four(BUFFERS)
def test_waiting_for_buffers_does_not_hide_who_is_late(launch: Launch) -> None:
    assert_named(launch, BUFFERS, "data")


def test_of_a_rank_that_saves_in_each_step_nobody_is_named_and_it_is_said_why(
    of_two: Launch,
) -> None:
    # Steps that save are not compared, and here there are no others.
    seen = of_two.seen["checkpoint"]

    assert seen.insufficient == (
        "insufficient data: most steps compile, save, evaluate, are skipped, or collect garbage"
    )
    assert seen.verdicts == []
    assert of_two.opened("checkpoint", SPEED) == []


def test_a_layer_that_waits_in_forward_and_backward_names_no_other_rank(of_two: Launch) -> None:
    # The one that is late in forward is the one that waits least there, and in backward as much.
    seen = of_two.seen["own_layer"]

    assert seen.insufficient == (
        "insufficient data: collectives of your own in `forward`, `backward`: a rank that is late "
        "there cannot be named"
    )
    assert seen.verdicts == []
    assert of_two.opened("own_layer", SPEED) == []


def assert_silent(launch: Launch, name: str) -> None:
    """Nobody is named, and not because there was nothing to go by."""
    seen = launch.seen[name]
    assert seen.insufficient == ""
    told = {(labels["rank"], value) for labels, value in seen.straggler}
    assert told == {(str(rank), 0.0) for rank in range(launch.world)}
    assert seen.verdicts == []
    assert launch.opened(name, SPEED) == []


def test_a_rank_with_twice_the_work_is_no_straggler(of_four: Launch) -> None:
    seen = of_four.seen["unequal"]
    (verdict,) = seen.verdicts
    assert (verdict["kind"], verdict["who"]["rank"]) == ("imbalance", of_four.chosen)
    assert "work is unequal" in verdict["sentence"]
    assert verdict["evidence"]["more_to_do"] == 1.0
    assert seen.named == []
    ((labels, value),) = seen.imbalance
    assert (labels["rank"], labels["phase"], value) == (of_four.chosen, verdict["phase"], 1.0)
    assert [
        said["verdict"] for _, said in of_four.opened("unequal", ["straggler", "imbalance"])
    ] == ["imbalance"]


# Learns until its loss is lost; then it waits for the end of its input.
LOSES_IT = """
import sys
import otel_ddp
run = otel_ddp.init(group="g", run="lost")
rank, lost_at = int(sys.argv[1]), int(sys.argv[2])
for step in range(400):
    loss = 1.0 / (step + 1) if step < lost_at else float("nan")
    run.log({"loss": loss, "lr": 0.1}, step=step)
    if step == lost_at and "raise" in sys.argv:
        raise SystemExit("the loss is lost")
sys.stdin.read()
"""


def test_a_loss_that_is_lost_with_the_last_value_of_a_process_is_told() -> None:
    with Node() as node:
        node.start(sys.executable, "-c", LOSES_IT, "0", "200", "raise")

        def told() -> list[dict[str, Any]]:
            return [each for each in survey([node.place]).verdicts if each["step"] == 200]

        (verdict,) = until(told, "the verdict")

    assert (verdict["kind"], verdict["evidence"]["value"]) == ("nonfinite", "NaN")


def test_a_loss_that_becomes_nan_is_told_with_its_rank_and_step() -> None:
    with Node() as node, Receiver() as receiver:
        node.export_to(receiver.start_http())
        # As it goes with averaged gradients: the other rank loses it one step later.
        processes = [
            node.start(
                *(sys.executable, "-c", LOSES_IT, str(rank), str(200 + 1 - rank)),
                env={"OTEL_DDP_RANK": str(rank), "OTEL_DDP_WORLD_SIZE": "2"},
            )
            for rank in (0, 1)
        ]

        def told() -> list[dict[str, Any]]:
            return [each for each in survey([node.place]).verdicts if each["step"] == 200]

        (verdict,) = until(told, "the verdict")
        shown = node.run("from otel_ddp.cli import main; main(['status'])")
        for process in processes:
            finished(process)  # closes its input
        node.stop_agent()
        records = [each for each in receiver.logs() if each.event_name == "training.nonfinite"]

    assert (verdict["kind"], verdict["who"]["run"]) == ("nonfinite", "lost")
    assert verdict["sentence"].startswith("loss became NaN at step 200 on rank 1 (")
    assert verdict["evidence"]["names"] == ["loss"]
    assert re.search(rf"! since [\d:]+: {re.escape(verdict['sentence'])}", shown)
    assert records[-1].severity_text == "WARN"
    assert records[-1].body.string_value == verdict["sentence"]
