"""Counts the model FLOPs of one real forward, and from it those of forward and backward."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import torch
from torch import nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from otel_ddp import errors
from otel_ddp.recording.device_scalars import captures, module_of
from otel_ddp.torch.readings.devices import peak
from otel_ddp.torch.steps.stepper import Stepper
from otel_ddp.torch.steps.watched_model import WatchedModel, shapes, shares_its_batch
from otel_ddp.vocabulary import catalog

# Where the two factors of a product stand among an op's arguments. For each factor that needs a
# gradient, backward does the forward's FLOPs once more.
_FACTORS: Final = {
    "aten.mm": (0, 1),
    "aten.bmm": (0, 1),
    "aten._scaled_mm": (0, 1),
    "aten.addmm": (1, 2),
    "aten.baddbmm": (1, 2),
    "aten.convolution": (0, 1),
    "aten._convolution": (0, 1),
    "aten.convolution_overrideable": (0, 1),
    "aten.cudnn_convolution": (0, 1),
    "aten._slow_conv2d_forward": (0, 1),
}
# Two products each, of query and key and of weights and value: four gradients for two.
_ATTENTION: Final = "aten._scaled_dot_product_"
# An op without a formula is taken to be free, as torch itself does, unless this is in its name.
_HEAVY: Final = re.compile(
    r"(^|[._:])(mm|bmm|addmm|gemm|matmul|linear|trilinear|rnn|attention|attn|convolution|conv[123]d)"
    r"(_|\d*$)"
)

# Private. Needed to leave a mode that is not the uppermost; without them nothing is counted.
_STACK: Final = ("_get_current_dispatch_mode_stack", "_pop_mode", "_push_mode")


class Counted(NamedTuple):
    """The FLOPs of one forward and of its backward, and the dtype of most of them."""

    forward: float
    backward: float
    dtype: str

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


class ForwardCounter:
    """Counts from `start` to `stop`, one forward at a time.

    After an interruption (Ctrl-C calls no forward hook), a later `stop` or `start` ends the count,
    and leaves nothing of ours behind.
    """

    def __init__(self) -> None:
        self._mode: _Counting | None = None
        self._closed = False

    @property
    def active(self) -> bool:
        """Whether a count is under way."""
        return self._mode is not None

    def start(self) -> None:
        """Count what this thread does from here on."""
        self.stop()
        if self._closed:
            return
        mode = self._mode = _Counting()
        try:
            mode.__enter__()
        finally:
            # A signal handler may have ended the count meanwhile.
            if self._closed or self._mode is not mode:
                self._mode = None
                _take_off(mode)

    def stop(self) -> Counted | None:
        """End the count; what it was, or None where that is not known."""
        mode, self._mode = self._mode, None
        return mode.counted() if mode is not None and _take_off(mode) else None

    def close(self) -> None:
        """Count nothing any more."""
        self._closed = True
        self.stop()


def countable(module: nn.Module) -> bool:
    """Whether a forward of this model can be counted now without harm."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if any(captures(module_of(each)) for each in {each.device for each in module.parameters()}):
        return False
    # In an older torch, a higher-order op raises under a mode that it does not know.
    knows = hasattr(TorchDispatchMode, "supports_higher_order_operators")
    if not knows and "torch.nn.attention.flex_attention" in sys.modules:
        return False
    # Dynamo's guards include the active modes: it would compile once more. Not only models are
    # compiled, but also functions that a model calls.
    if anything_compiled():
        return False
    return not _modes_active() and not any(_opaque(each) for each in module.modules())


def anything_compiled() -> bool:
    """Whether Dynamo has compiled anything in this process."""
    return _frames_compiled() > 0


def by_parameters(module: nn.Module, tokens: float) -> float:
    """The usual estimate for a transformer: 2 FLOPs a parameter and token forward, 4 backward.

    Nothing backward for frozen parameters. Gradients may pass through them to trained ones below
    (LoRA's do, at 2 more), but parameters do not show that. Attention itself is not in it.
    """
    # A lookup multiplies nothing, but an embedding may also be the weight of an output layer.
    multiplied = {
        id(each): each
        for owner in module.modules()
        if not isinstance(owner, (nn.Embedding, nn.EmbeddingBag))
        for each in owner.parameters(False)
    }
    work = sum((6 if each.requires_grad else 2) * each.numel() for each in multiplied.values())
    return float(tokens * work)


class _Counting(TorchDispatchMode):  # type: ignore[misc]
    """Counts each op below autograd, where composite ops have become those that are computed."""

    # Without it a higher-order op (flex_attention, cond) would raise in the user's forward.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        # Not at the top of the file: it looks for triton, which takes long.
        from torch.utils.flop_counter import flop_registry

        self._formulas: dict[Any, Callable[..., int]] = flop_registry
        self._training = torch.is_grad_enabled()
        self._frames = _frames_compiled()
        self._forward = self._backward = 0.0
        self._dtypes: Counter[str] = Counter()
        self._unknown = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # What is compiled in the middle of a count is compiled as without us.
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not self._unknown:
            try:
                self._count(func, types, args, kwargs, output)
            except errors.ANY_ERROR:
                errors.reraise_foreign()
                # A formula that does not know these shapes.
                self._unknown = True
        return output

    def counted(self) -> Counted | None:
        if self._unknown or not self._forward or _frames_compiled() != self._frames:
            return None
        return Counted(self._forward, self._backward, self._dtypes.most_common(1)[0][0])

    def _count(
        self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        packet = getattr(func, "overloadpacket", None)
        formula = self._formulas.get(packet)
        name = str(packet)
        if formula is None:
            # A higher-order op hides what it computes.
            self._unknown = packet is None or _HEAVY.search(name) is not None
            return
        # A subclass (a DTensor) has the shapes of all ranks together. And a formula that gets the
        # tensors themselves may read them, which waits for the device.
        if types or not hasattr(formula, "__wrapped__"):
            self._unknown = True
            return
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        forward = formula(*args, **kwargs, out_val=output)
        backward = forward * self._gradients(name, args, tensors)
        self._forward += forward
        self._backward += backward
        self._dtypes[_word(name, tensors[0])] += forward + backward

    def _gradients(self, name: str, args: tuple[Any, ...], tensors: list[torch.Tensor]) -> int:
        """How many times as much as its forward an op's backward is."""
        if not torch.is_grad_enabled():
            # What needs a gradient all the same is in a custom function, whose backward is unknown:
            # reentrant checkpointing does all of it, a quantised layer half.
            self._unknown = self._training and any(each.requires_grad for each in tensors)
            return 0
        if (factors := _FACTORS.get(name)) is not None:
            return sum(bool(args[each].requires_grad) for each in factors)
        needed = sum(each.requires_grad for each in tensors)
        if name.startswith(_ATTENTION) and not name.endswith("_backward"):
            return 2 if needed else 0
        # A gradient of a gradient, or a custom op.
        self._unknown = needed > 0
        return 0


def _take_off(mode: _Counting) -> bool:
    """Remove our mode, wherever it is in the stack; whether it was there.

    A mode's own exit removes the uppermost mode, whichever that is. Where a user's hooks enter one
    before forward and leave it after ours, that would remove theirs and keep ours.
    """
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    if not any(each is mode for each in stack):
        return False
    above: list[Any] = []
    while _python_dispatch._get_current_dispatch_mode_stack()[-1] is not mode:
        above.append(_python_dispatch._pop_mode())
    try:
        mode.__exit__(None, None, None)
    finally:
        for each in reversed(above):
            _python_dispatch._push_mode(each)
    return True


def _word(name: str, tensor: torch.Tensor) -> str:
    """The dtype in which a product is computed."""
    word = str(tensor.dtype).removeprefix("torch.")
    if word.startswith("float8"):
        return "float8"
    return "tf32" if word == "float32" and _tf32(name, tensor.device) else word


def _tf32(name: str, device: torch.device) -> bool:
    """Whether products of float32 go to the tensor cores."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    if torch.cuda.get_device_capability(device) < (8, 0):
        return False
    convolves = "conv" in name
    backend = torch.backends.cudnn if convolves else torch.backends.cuda.matmul
    # Newer versions of torch have this setting, and raise for the older one where this one is set.
    newer = getattr(backend, "conv", None) if convolves else backend
    precision = getattr(newer, "fp32_precision", None)
    return bool(backend.allow_tf32 if precision is None else precision == "tf32")


def _frames_compiled() -> int:
    """How many pieces of code Dynamo has seen in this process."""
    # Private: without it, only whole models are known to be compiled.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    # What is compiled with fullgraph=True counts as no frame, only as a graph.
    kinds = (("frames", "total"), ("stats", "unique_graphs"))
    return sum(int(counters.get(kind, {}).get(name, 0)) for kind, name in kinds)


def _modes_active() -> bool:
    """Whether other modes see the ops already."""
    if not all(hasattr(_python_dispatch, name) for name in _STACK) or (
        _python_dispatch._get_current_dispatch_mode_stack()
    ):
        return True
    functorch = getattr(torch._C, "_functorch", None)
    transform = getattr(functorch, "peek_interpreter_stack", lambda: None)
    return transform() is not None


def _opaque(module: nn.Module) -> bool:
    """Whether this thread cannot see the ops of a module one by one."""
    return (
        isinstance(module, (torch.jit.ScriptModule, nn.DataParallel))
        or getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        or type(module).__module__.startswith("deepspeed")
    )


# -- of each watched model, and added to those of the steps

# The first forward may build what is built lazily, or compile.
COUNTED_FORWARD = 2
# Of one model: its shapes may differ at each check.
_MOST_COUNTS = 8


class ModelFlops:
    """Counts one forward of each model, and checks now and then whether it is still true."""

    def __init__(self, stepper: Stepper) -> None:
        self._seen = stepper.seen
        self._work, self._recorder = stepper.progress.work, stepper.progress.recorder
        self._counter = ForwardCounter()
        self._models = WeakSet[WatchedModel]()
        # What the user knows, forward and backward.
        self.given_per_sample: float | None = None
        self.device: torch.device | None = None
        # Why the last model that could not be counted was not.
        self.uncounted = ""

    @property
    def any_shared(self) -> bool:
        """Whether other ranks work on the batches of one of the models."""
        return any(each.shared for each in self._models)

    def forward_began(
        self, watched: WatchedModel, module: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> None:
        """A training forward of a model whose FLOPs are not known, or may have changed."""
        self.interrupt()
        self._models.add(watched)
        watched.shared = watched.shared or shares_its_batch(module)
        watched.forwards += watched.settled_flops is None
        if watched.shared:
            self._leave_out(watched)
        elif watched.settled_flops is not None or watched.forwards == COUNTED_FORWARD:
            self._find(watched, module, (_trained(module), shapes(args, kwargs)))

    def _find(self, watched: WatchedModel, module: nn.Module, basis: Any) -> None:
        """The first figure of a model; or a new one, where what it depends on has changed."""
        if self.given_per_sample is not None:
            self._settle(watched, module, float(self.given_per_sample), "given", "")
        elif (
            watched.flops_method != "6pt"
            and basis != watched.counted_at
            and watched.counts < _MOST_COUNTS
            and countable(module)
        ):
            watched.counted_at = basis
            watched.counts += 1
            self._counter.start()
        else:
            self._do_without_count(watched, module)

    def _leave_out(self, watched: WatchedModel) -> None:
        """Each of several ranks would count all of the batch: none does, but for a given figure."""
        watched.counted = False
        if self.given_per_sample is not None:
            self._work.flops_method = "given"
            self._work.flops += float(self.given_per_sample) * watched.samples

    def forward_ended(self, watched: WatchedModel, module: nn.Module, returned: bool) -> None:
        """The same forward has returned or raised."""
        if not self._counter.active:
            return
        counted = self._counter.stop()
        if not returned:
            # It raised in the middle: the next one is counted.
            watched.counted_at = None
            watched.forwards -= watched.settled_flops is None
        elif counted and (units := watched.tokens or watched.samples):
            self._settle(watched, module, counted.total / units, "counted", counted.dtype)
        else:
            self._do_without_count(watched, module)

    def _do_without_count(self, watched: WatchedModel, module: nn.Module) -> None:
        """What was counted is taken to be as it was; else parameters and tokens tell it."""
        if watched.flops_method == "counted":
            watched.flops_per_unit = watched.settled_flops
            self._work.flops += watched.flops
        elif watched.tokens or watched.flops_method:
            self._settle(watched, module, by_parameters(module, 1), "6pt", "")
        else:
            self._seen.float16 |= _dtype_of(module) == "float16"
            watched.flops_per_unit = 0.0
            self.uncounted = "compiled" if anything_compiled() else "uncountable"

    def _settle(
        self, watched: WatchedModel, module: nn.Module, per_unit: float, method: str, dtype: str
    ) -> None:
        """A figure of this model is known."""
        watched.flops_per_unit, watched.by_samples = per_unit, method == "given"
        # With the first one: the forwards before this one are taken to be like it.
        is_first = watched.settled_flops is None
        self._work.flops += watched.flops * (watched.forwards if is_first else 1)
        self._work.flops_method = method
        if method != "given":
            watched.flops_method, watched.settled_flops = method, per_unit
        word = dtype or _dtype_of(module)
        self._seen.float16 |= word == "float16"
        self._recorder.documents.facts({"precision": word})
        if (device := self.device) is not None:
            # A device without a module or a name has no known peak.
            name = errors.attempt(lambda: str(module_of(device).get_device_name(device)), "")
            if (most := peak(name, word)) is not None:
                self._recorder.totals.stamp(
                    catalog.TRAINING_FLOPS_PEAK, most, dtype=word, device=name
                )

    def check_again(self) -> None:
        """Check each model's figure at its next forward."""
        for each in list(self._models):
            if each.settled_flops is not None:
                # Without a figure, the stepper reports its next forward.
                each.flops_per_unit = None

    def interrupt(self) -> None:
        """End a count that an interruption has left: no hook was called then."""
        self._counter.stop()

    def close(self) -> None:
        """Count nothing any more."""
        self._counter.close()


def _trained(module: nn.Module) -> bytes:
    return bytes(each.requires_grad for each in module.parameters())


def _dtype_of(module: nn.Module) -> str:
    parameter = next((p for p in module.parameters() if p.is_floating_point()), None)
    if parameter is None:
        return "float32"
    kind = parameter.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else parameter.dtype
    return str(dtype).removeprefix("torch.")
