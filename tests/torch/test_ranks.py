"""Two ranks and four: a late rank is late in its phase, and all others wait for it."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

from conftest import Journal
from node import Node, finished
from otel_ddp.agent.reading.steps import Step, StepStream
from otel_ddp.journal.layout import OF_BUFFERS
from otel_ddp.journal.parser import Steps
from otel_ddp.journal.reader import JournalReader
from otel_ddp.vocabulary.words import PHASES

pytestmark = pytest.mark.timed

STEPS = 24
LATE_S = 0.03
LATE_RANK = 1
BUFFERS = PHASES["comm_wait"] | OF_BUFFERS

TRAIN = """
import contextlib, functools, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

STEPS, LATE_S, LATE_RANK, WORK_S = 24, 0.03, 1, 0.005
dist.init_process_group("gloo")
rank = dist.get_rank()
gathered = [torch.ones(1) for _ in range(dist.get_world_size())] if rank == 0 else None


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


class Net(nn.Module):
    def __init__(self, late, norm):
        super().__init__()
        self.late = late
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()

    def forward(self, inputs):
        extra = lambda where: LATE_S if self.late == where else 0.0
        # Backward runs from the last line to the first.
        hidden = Pause.apply(self.first(inputs), WORK_S + extra("forward"), 0.0)
        hidden = self.norm(hidden)
        return Pause.apply(self.last(hidden), 0.0, WORK_S + extra("early backward"))


def batches(late):
    for _ in range(STEPS):
        if late == "data":
            time.sleep(LATE_S)
        yield torch.randn(4, 8)


# A bucket a layer: the last one's gradients are under way while backward goes on.
replicated = functools.partial(DistributedDataParallel, bucket_cap_mb=1e-4)


def sharded(net):
    fsdp.fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    net.no_sync = contextlib.nullcontext
    return net


def scenario(
    name, where, late_rank=LATE_RANK, norm=False, accumulate=1, wrap=replicated,
    own=lambda: None
):
    late = where if rank == late_rank else None
    model = wrap(Net(late, norm))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = otel_ddp.instrument(model, group=name)
    for number, batch in enumerate(otel_ddp.data(batches(late))):
        last = number % accumulate == accumulate - 1
        with contextlib.nullcontext() if last else model.no_sync():
            model(batch).sum().backward()
        own()
        if late == "other":
            time.sleep(LATE_S)
        if last:
            optimizer.step()
            optimizer.zero_grad()
    run.finish()


for where in ("data", "forward", "early backward", "other"):
    scenario(where, where)
scenario("norm of the late", "data", late_rank=0, norm=True)
scenario("accumulated", "data", accumulate=3)
scenario("balanced", None)
scenario("own collectives", None, own=lambda: dist.gather(torch.ones(1), gathered, dst=0))
if hasattr(fsdp, "fully_shard"):
    scenario("sharded", "data", wrap=sharded)
dist.destroy_process_group()
"""


class Rank(NamedTuple):
    """What one rank's journal tells of one scenario."""

    totals: dict[str, float]
    steps: list[Step]
    ended_ns: int
    facts: dict[str, Any]

    @property
    def steady(self) -> list[Step]:
        """Those that began and ended with all ranks at work."""
        return self.steps[2:-1]


class Launch(NamedTuple):
    """All scenarios on all ranks."""

    world: int
    ranks: dict[tuple[str, int], Rank]

    def all_but(self, scenario: str, late: int) -> list[Rank]:
        return [self.ranks[scenario, rank] for rank in range(self.world) if rank != late]


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(4, marks=pytest.mark.stress)],
    ids="{} ranks".format,
)
def launch(request: pytest.FixtureRequest) -> Launch:
    """One launch shows all scenarios, one after the other."""
    with Node(OTEL_DDP_AGENT="off") as node:
        script = node.root / "train.py"
        script.write_text(TRAIN)
        finished(node.torchrun(request.param, str(script)))
        ranks = {}
        for path in node.place.journals():
            journal = Journal(path)
            reader = JournalReader(path)
            stream = StepStream(reader.created_ns)
            progress = reader.progress()
            assert progress is not None
            reader.close()
            pieces = [each for each in journal.records if isinstance(each, Steps)]
            ranks[journal.identity["group"], journal.identity["global_rank"]] = Rank(
                {
                    "/".join((total.metric, *total.attributes.values())): total.values[0]
                    for total in journal.all_totals
                },
                [step for piece in pieces for step in stream.feed(piece)],
                progress.state_since_ns,
                journal.facts,
            )
        return Launch(request.param, ranks)


def typical(values: Iterable[float]) -> float:
    """The mean of the middle half: it varies less than the median, and no hiccup is in it."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    return statistics.fmean(ordered[quarter : len(ordered) - quarter])


def excess(late: Rank, other: Rank) -> dict[str, float]:
    """By how much longer a rank is in each phase of a step than another one, typically.

    Step by step: what both ranks had to wait for in one of them is no difference.
    """
    pairs = list(zip(late.steady, other.steady, strict=True))
    return {
        word: typical(one.seconds(code) - two.seconds(code) for one, two in pairs)
        for word, code in PHASES.items()
    }


def assert_late(late: Rank, other: Rank, /, **expected: float) -> None:
    """Longer by so much in these phases and in no others; and for so long the other one waited."""
    found = excess(late, other)
    wait_s = found.pop("comm_wait")
    wanted = {**dict.fromkeys(found, 0.0), **expected}
    # In a wrong phase, or in two, it would be off by all or half of it.
    assert found == pytest.approx(wanted, rel=0.4, abs=0.4 * LATE_S)
    assert -wait_s == pytest.approx(_lateness(late, other), rel=0.4)


def _lateness(late: Rank, other: Rank) -> float:
    # On a busy machine a rank is later than the test has asked, and the others wait for it.
    return typical(
        _without_waits(one) - _without_waits(two)
        for one, two in zip(late.steady, other.steady, strict=True)
    )


def _without_waits(step: Step) -> float:
    return step.took_ns / 1e9 - step.seconds(PHASES["comm_wait"])


@pytest.mark.parametrize(
    ("where", "phase"),
    [
        ("data", "data"),
        ("forward", "forward"),
        ("early backward", "backward"),
        ("other", "other"),
    ],
)
def test_what_a_rank_is_late_by_is_in_its_phase_and_a_wait_on_all_others(
    launch: Launch, where: str, phase: str
) -> None:
    late = launch.ranks[where, LATE_RANK]

    for other in launch.all_but(where, LATE_RANK):
        assert_late(late, other, **{phase: LATE_S})


def test_with_buffers_the_wait_moves_into_forward_and_is_still_a_wait(launch: Launch) -> None:
    # The others cannot begin without the buffers of rank 0.
    late = launch.ranks["norm of the late", 0]

    for other in launch.all_but("norm of the late", 0):
        assert_late(late, other, data=LATE_S)
        waited_s = _for_buffers(other) - _for_buffers(late)
        assert waited_s == pytest.approx(_lateness(late, other), rel=0.4)


def _for_buffers(rank: Rank) -> float:
    return typical(
        sum(part.ended_ns - part.began_ns for part in step.parts.each() if part.code == BUFFERS)
        / 1e9
        for step in rank.steady
    )


def test_it_is_known_in_which_phases_a_program_has_collectives_of_its_own(launch: Launch) -> None:
    for (name, _), rank in launch.ranks.items():
        found = rank.facts.get("own_collectives")
        # Where waits are not measured there is nothing to tell them from.
        expected = {"sharded": None, "own collectives": ["other"]}.get(name, [])
        assert found == expected, name


def test_the_phases_of_each_step_add_up_to_it(launch: Launch) -> None:
    for (name, _), rank in launch.ranks.items():
        assert len(rank.steps) == (STEPS / 3 if name == "accumulated" else STEPS)
        for step, following in zip(rank.steps, rank.steps[1:], strict=False):
            assert step.ended_ns == following.began_ns
        for step in rank.steps:
            spent = sum(step.seconds(phase) for phase in step.phases())
            assert spent == pytest.approx(step.took_ns / 1e9)


def test_the_totals_of_the_phases_add_up_to_the_steps(launch: Launch) -> None:
    for rank in launch.ranks.values():
        steps_s = sum(step.took_ns for step in rank.steps) / 1e9
        # The time from the last step to the end is in the totals of the phases, and in no step. The
        # end is written after the totals; something for a system clock that is being set right.
        after_s = (rank.ended_ns - rank.steps[-1].ended_ns) / 1e9 + 0.001

        phases_s = 0.0
        for word, code in PHASES.items():
            total_s = sum(
                value
                for name, value in rank.totals.items()
                if name.startswith(f"training.phase.time/{word}/host")
            )
            of_steps_s = sum(step.seconds(code) for step in rank.steps)
            assert of_steps_s - 1e-6 <= total_s <= of_steps_s + after_s
            phases_s += total_s

        assert rank.totals["training.step.duration"] == pytest.approx(steps_s)
        assert steps_s - 1e-6 <= phases_s <= steps_s + after_s


def test_balanced_ranks_hardly_wait(launch: Launch) -> None:
    for rank in range(launch.world):
        steady = launch.ranks["balanced", rank].steady
        waits = [step.seconds(PHASES["comm_wait"]) for step in steady]
        # Where the machine holds one of them up the others do wait, but not in every step.
        assert min(waits) < LATE_S / 3
