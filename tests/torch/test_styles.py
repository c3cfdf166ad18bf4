"""The ways in which people train: for each, what is measured and what is not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo

# Now: what it counts with is replaced by a test, and a late import would keep the replacement.
import torch._dynamo.backends.common
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adam
from torch.utils.checkpoint import checkpoint

import otel_ddp
from conftest import Here, Journal
from loops import INPUT, watched
from measured import OneOf
from node import Node, finished
from otel_ddp.torch.steps import budget

WORDS = torch.ones(2, 5, dtype=torch.long)


class Style(NamedTuple):
    """A way to train, and what comes out of it; by default three steps of eight samples."""

    name: str
    train: Callable[[], Any]
    """Trains and returns its models."""
    steps: int = 3
    micro_batches: int = 3
    samples: int = 24
    tokens: int = 0
    skipped: int = 0
    phases: str = "data forward backward comm_wait optimizer"
    missing: dict[str, str] = {}  # noqa: RUF012
    """What the capabilities say is not measured, and why; everything else is."""
    scaled: bool = False
    """Whether the capabilities speak of skipped steps as measured."""


EVERYTHING = ("optimizer", "forward", "backward", "comm_wait", "data", "samples")
WITH_COMPILE = "data forward backward comm_wait optimizer compile"
BY_COMPILER: dict[str, Any] = {"phases": WITH_COMPILE}
SCALED: dict[str, Any] = {
    "steps": 4,
    "skipped": 1,
    "micro_batches": 5,
    "samples": 40,
    "scaled": True,
}
UNSEEN = dict.fromkeys(("forward", "backward", "comm_wait", "samples", "flops"), "not_called")


# -- how they train, one process


def batches(count: int = 3) -> Iterable[torch.Tensor]:
    return otel_ddp.data([INPUT] * count)


def train(
    model: Callable[..., Any], optimizer: Any, count: int = 3, batch: torch.Tensor = INPUT
) -> None:
    for inputs in otel_ddp.data([batch] * count):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


def linear() -> nn.Module:
    return nn.Linear(4, 1)


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 1))


def trained(
    make: Callable[[], Any] = linear,
    optimizer: Callable[[Any], Any] = sgd,
    batch: torch.Tensor = INPUT,
    loss: Callable[[Any], torch.Tensor] = torch.sum,
    count: int = 3,
) -> Callable[[], Any]:
    """The line goes after the model is made, and before its optimizer."""

    def style() -> Any:
        model = make()
        otel_ddp.instrument(model)
        train(lambda inputs: loss(model(inputs)), optimizer(model), count, batch)
        return model

    return style


def no_loader() -> Any:
    model, optimizer = watched()
    for _ in range(3):
        model(INPUT).sum().backward()
        optimizer.step()
    return model


def with_dropout() -> nn.Module:
    """It draws random numbers, in steps that are measured and in others."""
    return nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.3), nn.Linear(16, 1))


def accumulated() -> Any:
    model, optimizer = watched()
    accumulate(model, optimizer)
    return model


def accumulate(
    model: Any,
    optimizer: Any,
    unsynced: Callable[[], Any] = contextlib.nullcontext,
) -> None:
    """Every second backward is followed by a step."""
    for number, batch in enumerate(batches(6)):
        last = number % 2 == 1
        with contextlib.nullcontext() if last else unsynced():
            model(batch).sum().backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def scaled(optimizer: Callable[[Any], Any], each: int = 1) -> Callable[[], Any]:
    """Five steps; the third has an infinity, and is not measured where few are."""

    def trained() -> Any:
        model = nn.Linear(4, 1)
        scaler = torch.amp.GradScaler("cpu")
        chosen = optimizer(model.parameters())
        otel_ddp.instrument(model, scaler=scaler)
        for step in range(5):
            chosen.zero_grad()
            for batch in batches(each):
                loss = model(batch).sum() * (float("inf") if step == 2 else 1.0)
                scaler.scale(loss).backward()
            scaler.step(chosen)
            scaler.update()
        return model

    return trained


def gan(named: bool = False) -> Any:
    generator, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    first, second = sgd(critic), sgd(generator)
    otel_ddp.instrument(generator)
    otel_ddp.instrument(critic, step_optimizer=second if named else None)
    for number, batch in enumerate(batches(4)):
        critic(generator(batch).detach()).sum().backward()
        first.step()
        # The generator learns every second time only.
        if number % 2:
            critic(generator(batch)).sum().backward()
            second.step()
    return generator, critic


def siamese() -> Any:
    model, optimizer = watched()
    for batch in batches():
        (model(batch) + model(batch + 1.0) - model(batch - 1.0)).sum().backward()
        optimizer.step()
    return model


def validated_in_training_mode() -> Any:
    model, optimizer = watched()
    for batch in batches():
        model(batch), model(batch)
        model(batch).sum().backward()
        optimizer.step()
    return model


def lbfgs() -> Any:
    model = nn.Linear(4, 1)
    otel_ddp.instrument(model)
    optimizer = LBFGS(model.parameters(), lr=0.01, max_iter=2)

    for batch in batches():

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
    return model


def in_backward() -> Any:
    model = nn.Linear(4, 1)
    otel_ddp.instrument(model)
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for batch in batches():
        model(batch).sum().backward()
    return model


def compiled_after() -> Any:
    model, optimizer = watched()
    train(torch.compile(model, backend="eager", fullgraph=True), optimizer)
    return model


def compiled_in_place() -> Any:
    model, optimizer = watched()
    model.compile(backend="eager", fullgraph=True)
    train(model, optimizer)
    return model


class Hidden(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> Any:
        loss = super().forward(inputs).sum()
        return lambda: loss


class Fragile(nn.Linear):
    """Fails where it is told to."""

    fails = ""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = super().forward(inputs)
        if self.fails == "forward":
            raise ArithmeticError("mine")
        if self.fails == "backward":
            # In the middle of it: what is returned has had its gradient by then.
            output.register_hook(self._break)
        return output * 1.0

    def _break(self, gradient: torch.Tensor) -> None:
        raise ArithmeticError("mine")


class FragileSGD(SGD):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            raise ArithmeticError("mine")
        return super().step(closure)


def failing(where: str) -> Callable[[], Any]:
    """The second of four steps fails, in one of its parts."""

    def trained() -> Any:
        model = Fragile(4, 1)
        optimizer = FragileSGD(model.parameters(), lr=0.1)
        otel_ddp.instrument(model)
        for number in range(4):
            model.fails = where if number == 1 else ""
            optimizer.fails = number == 1 and where == "optimizer"
            with pytest.raises(ArithmeticError) if number == 1 else contextlib.nullcontext():
                train(model, optimizer, 1)
        return model

    return trained


ALONE = [
    Style("plain loop", trained()),
    Style("dropout", trained(with_dropout, count=12), 12, 12, 8 * 12),
    Style("words", trained(embedded, batch=WORDS), samples=6, tokens=30),
    Style(
        "no loader of torch's",
        no_loader,
        phases="forward backward comm_wait optimizer",
        missing={"data": "no_loader"},
    ),
    Style("accumulation", accumulated, micro_batches=6, samples=48),
    Style("scaler, an infinity", scaled(lambda parameters: SGD(parameters, lr=0.1)), **SCALED),
    Style(
        "scaler, an infinity, fused Adam, accumulation",
        scaled(lambda parameters: Adam(parameters, fused=True), each=3),
        # Whether such an optimizer has left the weights alone is on its device.
        **{**SCALED, "steps": 5, "skipped": 0, "micro_batches": 15, "samples": 120},
    ),
    Style("GAN", gan, steps=4, micro_batches=6, samples=48),
    Style("GAN, step_optimizer", lambda: gan(named=True), steps=2, micro_batches=6, samples=48),
    Style("siamese", siamese),
    Style("validation in training mode", validated_in_training_mode),
    # Each step evaluates twice.
    Style("LBFGS", lbfgs, micro_batches=6, samples=48),
    Style("optimizer in backward", in_backward, phases="data forward backward comm_wait"),
    Style(
        "compiled, then watched",
        trained(lambda: torch.compile(linear(), backend="eager", fullgraph=True)),
        **BY_COMPILER,
    ),
    Style(
        "watched, then compiled",
        compiled_after,
        micro_batches=0,
        samples=0,
        phases="data optimizer compile",
        missing=UNSEEN,
    ),
    Style(
        # What the first step compiled has no hooks in it; from the second on they are outside.
        "watched, then compiled in place",
        compiled_in_place,
        micro_batches=2,
        samples=16,
        **BY_COMPILER,
    ),
    Style(
        "output without a tensor",
        trained(lambda: Hidden(4, 1), loss=lambda output: output()),
        micro_batches=0,
        phases="data forward optimizer",
        missing={"backward": "outputs_unknown", "comm_wait": "outputs_unknown"},
    ),
    Style("exception in forward", failing("forward")),
    Style("exception in backward", failing("backward")),
    Style("exception in the optimizer", failing("optimizer"), samples=32, micro_batches=4),
]


# -- how they train, two ranks


def group() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def wrapped(model: nn.Module) -> DistributedDataParallel:
    group()
    return DistributedDataParallel(model)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def watched_before_all() -> Any:
    """From the first step on, what is watched is the DDP that calls the model."""
    inner = normed()
    otel_ddp.instrument(inner)
    model = wrapped(inner)
    train(model, sgd(model))
    return model


def ddp(make: Callable[[], nn.Module] = linear) -> Callable[[], Any]:
    return trained(lambda: wrapped(make()))


def zero(model: nn.Module) -> Any:
    return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=SGD, lr=0.1)


def no_sync() -> Any:
    model = wrapped(nn.Linear(4, 1))
    otel_ddp.instrument(model)
    accumulate(model, sgd(model), unsynced=model.no_sync)
    return model


class Checkpointed(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> Any:
        output: Any = checkpoint(super().forward, inputs, use_reentrant=True)
        return {"loss": output.sum()}


def ddp_checkpointed() -> Any:
    model = wrapped(Checkpointed(4, 1))
    optimizer = sgd(model)
    otel_ddp.instrument(model)
    for _ in batches():
        model(INPUT.clone().requires_grad_())["loss"].backward()
        optimizer.step()
    return model


def sharded() -> Any:
    group()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    mesh = init_device_mesh("cpu", (2,))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    otel_ddp.instrument(model)
    optimizer = sgd(model)
    for batch in batches():
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def reduced_by_hand() -> Any:
    group()
    model, optimizer = watched()
    for batch in batches():
        model(batch).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
    return model


WITH_BUFFERS = "data forward backward comm_wait buffers optimizer"
ON_RANKS = [
    Style("DDP", ddp()),
    Style("DDP, batch norm", ddp(normed), phases=WITH_BUFFERS),
    Style("DDP, watched before it was wrapped", watched_before_all, phases=WITH_BUFFERS),
    Style("DDP, no_sync", no_sync, micro_batches=6, samples=48),
    Style(
        "DDP, reentrant checkpointing",
        ddp_checkpointed,
        missing={"comm_wait": "reentrant_checkpoint"},
    ),
    Style(
        "DDP, compiled",
        trained(lambda: torch.compile(wrapped(linear()), backend="eager")),
        **BY_COMPILER,
    ),
    Style("DDP, ZeRO", trained(lambda: wrapped(nn.Sequential(nn.Linear(4, 4), linear())), zero)),
    Style("FSDP2", sharded, missing={"comm_wait": "fsdp"}),
    Style("no DDP", reduced_by_hand, missing={"comm_wait": "no_ddp"}),
]


def train_on_ranks() -> None:
    """What each of two ranks does."""
    for style in ON_RANKS:
        forget_what_is_compiled()
        torch.manual_seed(3)
        run = otel_ddp.init(group=style.name)
        kept = style.train()
        run.finish()
        del kept
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def on_ranks() -> dict[tuple[str, int], Journal]:
    """The journals of every style and rank, from one launch of two ranks."""
    with Node(
        OTEL_DDP_AGENT="off",
        OTEL_DDP_SAMPLE_STEPS="2",
        PYTHONPATH=os.pathsep.join(map(str, Path(__file__).parents[1:3])),
    ) as node:
        finished(node.torchrun(2, __file__))
        journals = [Journal(path) for path in node.place.journals()]
        return {(each.identity["group"], each.identity["global_rank"]): each for each in journals}


def weights(trained: Any) -> list[torch.Tensor]:
    models = trained if isinstance(trained, tuple) else (trained,)
    return [parameter.detach() for model in models for parameter in model.parameters()]


def check(style: Style, journal: Journal) -> None:
    """What the journal says is what the style is expected to give."""
    totals = {name: value for name, value in journal.totals.items() if value}
    spent = {name.split("/")[1] for name in totals if name.startswith("training.phase.time/")}
    if "training.phase.time/comm_wait/host/buffers" in totals:
        spent.add("buffers")
    capability = dict(journal.facts.get("capability", {}))
    # Asked for in a forward now and then; it has tests of its own.
    capability.pop("loss", None)

    assert "otel_ddp.hook.errors" not in totals
    counts = {
        "steps": totals.get("training.steps", 0),
        "skipped": totals.get("training.steps.skipped/overflow", 0),
        "micro_batches": totals.get("training.micro_batches", 0),
        "samples": totals.get("training.samples", 0),
        "tokens": totals.get("training.tokens", 0),
    }
    assert counts == {name: getattr(style, name) for name in counts}
    assert spent - {"other"} == set(style.phases.split())
    measured = {*EVERYTHING, *(["skipped_steps"] if style.scaled else [])}
    if style in ON_RANKS:
        measured.add("calls")
    flops = {"flops": "" if style.tokens else "uncountable"}
    assert capability == {**dict.fromkeys(measured, ""), **flops, **style.missing}


def forget_what_is_compiled() -> None:
    """It is compiled once only, and rules counting out."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterable[None]:
    forget_what_is_compiled()
    torch.manual_seed(3)
    yield
    forget_what_is_compiled()


@pytest.mark.parametrize("style", ALONE, ids=lambda style: style.name)
def test_one_process(style: Style, place: Here) -> None:
    otel_ddp.init()
    trained = style.train()
    left_open = place.only().phase
    otel_ddp.finish()

    check(style, place.only())
    assert left_open == "other"
    assert_learnt_without_us(style, trained)


def assert_learnt_without_us(style: Style, trained: Any) -> None:
    """What was learnt is what is learnt without us."""
    os.environ["OTEL_SDK_DISABLED"] = "true"
    torch.manual_seed(3)
    for ours, without in zip(weights(trained), weights(style.train()), strict=True):
        assert torch.equal(ours, without)


@pytest.mark.parametrize("style", ALONE, ids=lambda style: style.name)
def test_few_steps_are_measured(style: Style, place: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_DDP_OVERHEAD", "0.005")
    monkeypatch.setattr(budget, "_FIRST_STEPS", 0)
    monkeypatch.setattr(budget, "Budget", lambda share: OneOf(4))
    otel_ddp.init()
    trained = style.train()
    otel_ddp.finish()

    totals = {each.metric: each.values[0] for each in place.only().all_totals}
    assert not totals.get("otel_ddp.hook.errors")
    counted = [totals.get(f"training.{name}", 0) for name in ("steps", "steps.skipped")]
    assert counted == [style.steps, style.skipped]
    assert_learnt_without_us(style, trained)


@pytest.mark.parametrize("style", ON_RANKS, ids=lambda style: style.name)
def test_two_ranks(style: Style, on_ranks: dict[tuple[str, int], Journal]) -> None:
    for rank in (0, 1):
        check(style, on_ranks[(style.name, rank)])


def test_a_sharded_model_has_no_norm_that_would_take_a_collective(
    on_ranks: dict[tuple[str, int], Journal],
) -> None:
    assert "grad_norm" in dict(on_ranks["DDP", 0].points)
    assert "grad_norm" not in dict(on_ranks["FSDP2", 0].points)


if __name__ == "__main__":
    train_on_ranks()
