"""FLOPs of forward and backward from one forward, against torch's own counter over both."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from otel_ddp.torch.readings.flops import (
    COUNTED_FORWARD,
    Counted,
    ForwardCounter,
    ModelFlops,
    by_parameters,
    countable,
)
from otel_ddp.torch.steps.watched_model import WatchedModel


@pytest.fixture(autouse=True)
def _nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Other tests of this process may have compiled something; and no mode is left behind."""
    monkeypatch.setattr("torch._dynamo.utils.counters", {})
    torch.manual_seed(0)
    yield
    assert not _get_current_dispatch_mode_stack()


def ours(forward: Callable[[], Any]) -> Counted | None:
    counter = ForwardCounter()
    counter.start()
    try:
        forward()
    finally:
        counted = counter.stop()
    return counted


def torchs(forward: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """FLOPs of forward, and of both, as torch counts those that are really done."""
    with FlopCounterMode(display=False) as counter:
        loss = forward().float().sum()
        alone = counter.get_total_flops()
        loss.backward()
    return alone, counter.get_total_flops()


def same(forward: Callable[[], torch.Tensor]) -> Counted:
    counted = ours(forward)
    assert counted is not None
    assert (counted.forward, counted.total) == torchs(forward)
    return counted


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4), nn.Linear(4, 2, bias=False))


BATCH = torch.randn(5, 8)


def test_an_mlp_whose_input_needs_no_gradient() -> None:
    model = mlp()

    counted = same(lambda: model(BATCH))

    products = [2 * 5 * 8 * 16, 2 * 5 * 16 * 4, 2 * 5 * 4 * 2]
    # The first layer has the gradient of its weight alone.
    assert counted == (sum(products), 2 * sum(products) - products[0], "float32")


class Adapted(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.base = nn.Linear(size, size).requires_grad_(False)
        self.down, self.up = nn.Linear(size, 2, bias=False), nn.Linear(2, size, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.base(inputs) + self.up(self.down(inputs))


class Attending(nn.MultiheadAttention):
    """With weights, which nothing fused computes."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs, inputs, inputs)[0]


class Fused(nn.Linear):
    """Fused attention that nothing trains has no backward."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(F.scaled_dot_product_attention(inputs, inputs, inputs))


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (mlp(), (3, 7, 8)),
        (nn.Sequential(Adapted(8), Adapted(8)), (5, 8)),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 3)), (2, 3, 12, 12)),
        (Attending(8, 2), (3, 5, 8)),
        (Fused(4, 4), (1, 1, 5, 4)),
    ],
    ids=["sequences", "adapters", "convolutions", "attention", "fused attention"],
)
def test_what_models_are_made_of(model: nn.Module, shape: tuple[int, ...]) -> None:
    batch = torch.randn(shape)

    same(lambda: model(batch))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.feed = (
            nn.Linear(8, 24),
            nn.Sequential(nn.Linear(8, 32), nn.Linear(32, 8)),
        )
        self.dropout = nn.Dropout(0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        parts = self.project(inputs).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
        return inputs + self.feed(self.dropout(mixed))


SEQUENCES = torch.randn(3, 5, 8)


def test_fused_attention_is_counted_without_what_it_computes_again() -> None:
    model = Block()

    counted = ours(lambda: model(SEQUENCES))

    forward, both = torchs(lambda: model(SEQUENCES))
    # Its backward has four products, and a fifth for the weights that forward did not keep.
    product = 2 * 3 * 2 * 5 * 5 * 4
    assert counted is not None
    assert counted.forward == forward
    assert counted.total == both - product


@pytest.mark.usefixtures("alone")
def test_a_model_that_is_sharded() -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    model = mlp()
    expected = ours(lambda: model(BATCH))
    mesh = init_device_mesh("cpu", (1,))
    for layer in model:
        fsdp.fully_shard(layer, mesh=mesh)
    fsdp.fully_shard(model, mesh=mesh)

    assert countable(model)
    assert same(lambda: model(BATCH)) == expected


@pytest.mark.usefixtures("alone")
def test_distributed_tensors_are_not_counted() -> None:
    tensor = pytest.importorskip("torch.distributed.tensor")
    mesh = init_device_mesh("cpu", (1,))
    weight = tensor.distribute_tensor(torch.ones(8, 4), mesh, [tensor.Shard(0)])
    batch = tensor.distribute_tensor(BATCH, mesh, [tensor.Replicate()])

    assert ours(lambda: batch @ weight) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_says_what_is_computed_in(dtype: torch.dtype) -> None:
    model = mlp()

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", dtype=dtype):
            return model(BATCH)

    assert same(forward).dtype == str(dtype).removeprefix("torch.")


def test_checkpointing_is_counted_once() -> None:
    model = mlp()

    def forward() -> torch.Tensor:
        return checkpoint(model, BATCH, use_reentrant=False)

    counted = ours(forward)

    assert counted == same(lambda: model(BATCH))
    assert counted is not None
    assert torchs(forward)[1] > counted.total


def test_a_teacher_without_gradients_has_a_forward_only() -> None:
    teacher, student = mlp().requires_grad_(False), mlp()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            target = teacher(BATCH)
        return student(BATCH) - target

    alone = ours(lambda: student(BATCH))
    assert alone is not None
    assert same(forward) == (2 * alone.forward, alone.backward, "float32")


def test_products_that_have_no_formula_are_not_taken_for_nothing() -> None:
    layer = nn.Linear(8, 8)

    def forward() -> torch.Tensor:
        with torch.inference_mode():
            layer(BATCH)  # below inference mode, linear itself is the op
        return layer(BATCH)

    assert ours(forward) is None
    # An interpolation is linear by name only.
    assert ours(lambda: F.interpolate(layer(BATCH)[None], 4, mode="linear")) is not None


def test_a_formula_that_reads_tensors_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def reads(*tensors: torch.Tensor, **others: Any) -> int:
        asked.append(tensors)  # on a device, reading them would wait for it
        return 1

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.relu, reads)

    assert ours(lambda: mlp()(BATCH)) is None
    assert not asked


def test_a_formula_that_fails_does_not_reach_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    @flop_counter.shape_wrapper
    def fails(*shapes: Any, **others: Any) -> int:
        raise ValueError("not of this shape")

    monkeypatch.setitem(flop_counter.flop_registry, torch.ops.aten.relu, fails)

    assert ours(lambda: mlp()(BATCH)) is None


def test_a_higher_order_op_runs_and_is_not_counted() -> None:
    flex = pytest.importorskip("torch._higher_order_ops.flex_attention")

    def score(value: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
        return value

    parts = torch.ones(1, 1, 16, 16)
    blocks = flex_blocks(16)

    def forward() -> torch.Tensor:
        mlp()(BATCH)
        return flex.flex_attention(parts, parts, parts, score, blocks, 1.0, {})[0]

    assert ours(forward) is None
    assert torch.equal(forward(), torch.ones(1, 1, 16, 16))


def flex_blocks(size: int) -> Any:
    from torch.nn.attention.flex_attention import _create_empty_block_mask

    one = torch.ones(1, 1, size, size)
    return _create_empty_block_mask(one, one).as_tuple()


def test_a_forward_that_raises_leaves_nothing_behind() -> None:
    model = mlp()
    counter = ForwardCounter()
    model.register_forward_pre_hook(lambda *_: counter.start())
    model.register_forward_hook(lambda *_: counter.stop(), always_call=True)

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(3, 3))

    assert not counter.active


def test_a_mode_that_a_users_hooks_enter_and_leave_stays_theirs() -> None:
    class Theirs(TorchDispatchMode):
        seen = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen += 1
            return func(*args, **(kwargs or {}))

    theirs, counter = Theirs(), ForwardCounter()

    counter.start()
    theirs.__enter__()
    mlp()(BATCH)
    counted = counter.stop()
    assert _get_current_dispatch_mode_stack() == [theirs]
    before = theirs.seen
    torch.ones(1) + 1
    assert theirs.seen > before
    theirs.__exit__(None, None, None)

    assert counted == ours(lambda: mlp()(BATCH))


def test_what_is_compiled_is_let_be() -> None:
    model = mlp()
    assert countable(model)
    assert not countable(torch.compile(model, backend="eager"))
    assert not countable(nn.Sequential(torch.compile(mlp(), backend="eager")))

    inner = copy.deepcopy(model)
    inner[0].compile(backend="eager")
    assert not countable(inner)


def test_a_compiled_function_rules_counting_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    torch._dynamo.reset()
    multiply = torch.compile(lambda: BATCH @ BATCH.t(), backend="eager")

    # For the first time in the middle of a count: what it computes may go unseen.
    assert ours(multiply) is None
    assert not countable(mlp())


def test_a_count_causes_no_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    torch._dynamo.reset()
    compiled: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    multiply = torch.compile(lambda batch: batch @ batch.t(), backend=backend)
    ours(lambda: multiply(BATCH))
    assert len(compiled) == 1
    multiply(BATCH)
    ours(lambda: multiply(BATCH))
    assert len(compiled) == 1


def test_scripts_replicas_and_deepspeed_are_let_be() -> None:
    class Engine(nn.Module):
        __module__ = "deepspeed.runtime.engine"

    with pytest.warns((DeprecationWarning, FutureWarning)):
        script = torch.jit.script(mlp())
    assert not countable(script)
    assert not countable(nn.DataParallel(mlp()))
    assert not countable(Engine())


def test_other_observers_are_let_be() -> None:
    model = mlp()

    with FlopCounterMode(display=False):
        assert not countable(model)
    assert torch.func.vmap(lambda each: each + countable(model))(torch.zeros(1)) == 0
    with torch.device("cpu"):  # what torch.set_default_device does as well
        assert countable(model)


def test_nothing_is_counted_while_a_graph_is_captured_whatever_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capturing = True
    device = SimpleNamespace(Event=object, is_current_stream_capturing=lambda: capturing)
    monkeypatch.setattr(torch, "meta", device, raising=False)
    model = mlp().to("meta")

    assert not countable(model)
    assert countable(mlp())
    capturing = False
    assert countable(model)


def test_a_device_that_was_never_used_is_not_asked_whether_it_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = SimpleNamespace(
        Event=object, is_initialized=lambda: False, is_current_stream_capturing=lambda: 1 // 0
    )
    monkeypatch.setattr(torch, "meta", device, raising=False)

    assert countable(mlp().to("meta"))


@pytest.mark.parametrize(
    ("module", "peaks"),
    [
        ({"get_device_name": lambda _: "AMD Instinct MI300X"}, [("AMD Instinct MI300X", 163.4e12)]),
        ({"get_device_name": lambda _: 1 // 0}, []),
        ({}, []),
        (None, []),
    ],
)
def test_a_device_is_asked_for_its_name_whatever_its_type(
    module: Any, peaks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if module is not None:
        device = SimpleNamespace(Event=object, **module)
        monkeypatch.setattr(torch, "meta", device, raising=False)
    progress = SimpleNamespace(work=SimpleNamespace(flops=0.0), recorder=Mock())
    readings = ModelFlops(cast("Any", SimpleNamespace(progress=progress, seen=Mock(float16=False))))
    readings.device, readings.given_per_sample = torch.device("meta"), 6.0
    model = mlp()
    watched = WatchedModel(model, {})

    for _ in range(COUNTED_FORWARD):
        readings.forward_began(watched, model, (BATCH,), {})

    assert watched.flops_per_unit == 6.0
    stamps = progress.recorder.totals.stamp.call_args_list
    assert [(each.kwargs["device"], each.args[1]) for each in stamps] == peaks


def test_parameters_give_the_usual_estimate() -> None:
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 100))
    model[1].requires_grad_(False)

    assert by_parameters(model, 10) == 10 * (2 * 64 + 6 * 900)

    # The same table at both ends: the output multiplies with it.
    model[0].weight = model[2].weight
    assert by_parameters(model, 10) == 10 * (2 * 64 + 6 * 900)
    assert by_parameters(nn.Embedding(100, 8), 10) == 0
