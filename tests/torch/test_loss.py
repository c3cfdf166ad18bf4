"""The loss that backward begins at; where there is none, why."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.optim import SGD
from torch.testing._internal.distributed.fake_pg import FakeStore

import otel_ddp
from conftest import Here, Journal
from extras import newer_torch

INPUT = torch.ones(8, 4)


@pytest.fixture(autouse=True)
def _each_step_is_looked_at() -> None:
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = "1"


def learnt(
    place: Here, steps: int, loss_of: Callable[[], torch.Tensor], *optimizers: SGD
) -> tuple[Journal, dict[int, float]]:
    """Train for so many steps and end the run; its journal, and the loss of each step."""
    seen, made = {}, []
    for step in range(1, steps + 1):
        loss = loss_of()
        made.append(weakref.ref(loss))
        seen[step] = float(loss.detach())
        loss.backward(torch.ones_like(loss))
        # What a loop does to its loss later is not our loss.
        loss.detach().zero_()
        for optimizer in optimizers:
            optimizer.step()
    del loss
    # What was read holds no graph.
    assert [each() for each in made] == [None] * steps
    otel_ddp.finish()
    return place.only(), seen


def only(seen: dict[int, float], *steps: int) -> dict[int, float]:
    return {step: seen[step] for step in steps}


def losses(journal: Journal) -> dict[int | None, float]:
    """Those that were read, by step."""
    return journal.curves.get("loss", {})


def watched(wrap: Callable[[nn.Module], nn.Module] | None = None) -> tuple[nn.Module, SGD]:
    """A model that returns no loss, and its optimizer."""
    model: nn.Module = nn.Linear(4, 1)
    if wrap is not None:
        model = wrap(model)
    otel_ddp.instrument(model)
    return model, SGD(model.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("loss_of", "reason"),
    [
        (lambda logits: logits.square().mean(), ""),
        (lambda logits: functional.mse_loss(logits, torch.zeros(8, 1)), ""),
        (lambda logits: logits.square().mean() + logits.abs().sum(), ""),
        (lambda logits: logits.square().mean() / 4, ""),
        # What a scaler makes of a loss.
        (lambda logits: logits.square().mean() * torch.tensor(65536.0), "scaled_loss"),
        # What comes after it does not hide it, unless it is a sum over several.
        (lambda logits: (logits.square().mean() * 4).mean(), "scaled_loss"),
        (
            lambda logits: (logits.square().mean().reshape(1) * 4 / 2).squeeze().double(),
            "scaled_loss",
        ),
        (lambda logits: sum([logits.square().mean() * 65536.0]), "scaled_loss"),
        (lambda logits: torch.stack([logits.square().mean() * 4]).mean(), "scaled_loss"),
        # Of two that are learned.
        (lambda logits: logits.square().mean() * logits.abs().mean(), ""),
        (lambda logits: (logits.square() * 4).mean(), ""),
        (lambda logits: logits.square().mean() + logits.abs().mean() * 4, ""),
        # Each begins at its own.
        (lambda logits: logits.square().mean(0), "no_loss"),
    ],
)
def test_the_loss_of_a_plain_loop_is_what_its_backward_begins_at(
    place: Here, loss_of: Any, reason: str
) -> None:
    model, optimizer = watched()

    journal, seen = learnt(place, 4, lambda: loss_of(model(INPUT)), optimizer)

    assert losses(journal) == ({} if reason else only(seen, 2, 3, 4))
    assert journal.facts["capability"]["loss"] == reason


@pytest.mark.parametrize(("steps", "logs_at", "ours"), [(150, 120, 0), (250, 999, 249)])
def test_a_loop_that_logs_its_loss_late_has_only_its_own(
    place: Here, steps: int, logs_at: int, ours: int
) -> None:
    model, optimizer = watched()

    for step in range(1, steps + 1):
        loss = model(INPUT).square().mean()
        loss.backward()
        optimizer.step()
        if step == logs_at:
            otel_ddp.log({"loss": loss})
        if step == 199:
            # No curve yet, for it may still be the loop's.
            assert losses(place.only()) == {}
    otel_ddp.finish()

    found = losses(place.only())
    assert len(found) == (ours or 1)
    assert set(found) == (set(range(2, steps + 1)) if ours else {logs_at})


@pytest.mark.parametrize(
    ("ranks", "sharded", "found"), [(1, False, [2, 3, 5]), (2, True, [2, 3, 5]), (2, False, [])]
)
def test_of_shares_of_a_step_it_is_their_sum_unless_ranks_may_share_it_too(
    place: Here, ranks: int, sharded: bool, found: list[int]
) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    model, optimizer = watched(fully_shard if sharded else None)
    # In bfloat16, as most accumulate.
    precision = torch.autocast("cpu", torch.bfloat16)

    seen = {}
    # An epoch ends in the fourth step, with too few batches.
    for step, batches in enumerate([4, 4, 4, 2, 4], 1):
        seen[step] = 0.0
        for batch in range(batches):
            # As in the inner loop of a meta-learner.
            torch.autograd.grad(model(INPUT).square().sum(), model.parameters())
            with precision:
                loss = functional.mse_loss(model(INPUT * (batch + 1)), torch.zeros(8, 1))
            seen[step] += float(loss.detach()) / 4
            ways = loss / 4, loss / 8 + loss / 8, loss / 2 - loss / 4, loss / 8 + 0.125 * loss
            ways[batch % 4].backward()
        optimizer.step()
    otel_ddp.finish()
    dist.destroy_process_group()

    journal = place.only()
    assert losses(journal) == pytest.approx(only(seen, *found))
    assert journal.facts["capability"]["loss"] == ("" if found else "scaled_loss")


def test_a_backward_before_that_of_the_loop_hides_no_loss(place: Here) -> None:
    model, optimizer = watched()

    def penalised() -> torch.Tensor:
        inputs = INPUT.clone().requires_grad_()
        logits = model(inputs)
        (gradient,) = torch.autograd.grad(logits.sum(), inputs, create_graph=True)
        return logits.square().mean() + gradient.square().mean()

    journal, seen = learnt(place, 4, penalised, optimizer)

    found = losses(journal)
    assert {3, 4} <= found.keys()
    assert found == only(seen, *found)


@pytest.mark.parametrize("forwards", [1, 2])
def test_of_two_backwards_of_a_step_it_is_the_loss_of_the_first(place: Here, forwards: int) -> None:
    model, optimizer = watched()

    seen = {}
    for step in range(1, 4):
        # Two forwards, as a pipeline makes them, before the backward of the first.
        logits = [model(INPUT) for _ in range(forwards)]
        loss = logits[0].square().mean()
        seen[step] = float(loss.detach())
        loss.backward(retain_graph=True)
        logits[-1].abs().sum().backward()
        optimizer.step()
    otel_ddp.finish()

    assert losses(place.only()) == only(seen, 2, 3)


@newer_torch("DTensor of that name")
def test_this_ranks_part_of_a_loss_is_no_loss(place: Here, alone: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    model, optimizer = watched()
    mesh = init_device_mesh("cpu", (1,))

    def part() -> torch.Tensor:
        loss = model(INPUT).square().mean()
        return DTensor.from_local(loss, mesh, [Partial()]).to_local()

    assert losses(learnt(place, 3, part, optimizer)[0]) == {}


@pytest.mark.parametrize("critic_steps", [1, 5])
def test_two_optimizers_in_turn_have_no_loss_that_is_the_loss(
    place: Here, critic_steps: int
) -> None:
    critic, generator = nn.Linear(4, 1), nn.Linear(4, 4)
    of_critic = SGD(critic.parameters(), lr=0.01)
    of_generator = SGD(generator.parameters(), lr=0.01)
    otel_ddp.instrument(critic)
    otel_ddp.instrument(generator)

    for step in range(20):
        critic(generator(INPUT).detach()).mean().backward()
        of_critic.step()
        if step % critic_steps == 0:
            critic(generator(INPUT)).mean().backward()
            of_generator.step()
    otel_ddp.finish()

    journal = place.only()
    assert losses(journal) == {}
    assert journal.facts["capability"]["loss"] == "several_losses"


@pytest.mark.parametrize("named", [False, True])
def test_two_optimizers_after_one_backward_have_its_loss(place: Here, named: bool) -> None:
    # As matrices and the rest have it.
    model = nn.Linear(4, 1)
    of_matrix, of_rest = SGD([model.weight], lr=0.01), SGD([model.bias], lr=0.01)
    otel_ddp.instrument(model, **({"step_optimizer": of_rest} if named else {}))

    journal, seen = learnt(place, 20, lambda: model(INPUT).square().mean(), of_matrix, of_rest)

    found = losses(journal)
    assert {5, 10, 20} <= found.keys()
    assert found == only(seen, *found)
    assert journal.facts["capability"]["loss"] == ""
