"""Usual steps leave the journal that all others would: programs drawn by chance, measured twice."""

from __future__ import annotations

import gc
import random
import threading
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import otel_ddp
from measured import Measured, Slow
from otel_ddp import errors
from otel_ddp.journal import layout
from otel_ddp.journal.reader import JournalReader, Steps
from otel_ddp.recording.phases import PHASE_WORD
from otel_ddp.torch import measure
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.steps.usual import unusual

PROGRAMS, ACTIONS = 120, 60
BATCH = torch.ones(8, 4)


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, model: Model) -> torch.Tensor:
        ctx.model = model
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.model.raises_in_backward:
            raise ArithmeticError("in backward")
        return gradient, None


class Model(nn.Module):
    """Takes a millisecond, and may raise."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.inner, self.program = nn.Linear(4, 1), program
        self.within: Callable[[], None] | None = None
        self.raises_in_backward = self.pair = False

    def forward(self, inputs: torch.Tensor, raises: type[BaseException] | None = None) -> Any:
        self.program.spend()
        within, self.within = self.within, None
        if within is not None:
            within()
        if raises is not None:
            raise raises("in forward")
        if self.raises_in_backward:
            inputs = _Raises.apply(inputs.clone().requires_grad_(), self)
        hidden = self.inner(inputs)
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.program.spend())
        return (hidden * 1.0, hidden * 2.0) if self.pair else hidden * 1.0


class Program:
    """One training, and what was to be seen of it after each of its actions."""

    def __init__(self, place: Path, seed: int, usual: bool) -> None:
        self.measured, self.chance = Measured(place), random.Random(seed)
        self.progress = self.measured.progress
        torch.manual_seed(0)
        self.model, self.stranger = Model(self), nn.Linear(4, 1)
        # Fused: it is told of an overflow, and makes its step all the same.
        self.optimizer = SGD(self.model.parameters(), lr=0.01, fused=True)
        self.of_stranger = SGD(self.stranger.parameters(), lr=0.01)
        self.batches = iter(otel_ddp.data(iter(self.next_batch, None)))
        self.when_loaded: Callable[[], None] = self.spend
        self.measured.instrument(self.model)
        assert measure._current is not None
        self.stepper = stepper = measure._current.stepper
        if not usual:
            kept = stepper.usual._replace(learn=lambda: None)
            stepper.usual = stepper.optimizers._usual = kept
        stepper.sampled.sample_every(8 if seed % 2 else 1000)
        self.phase: Any = None
        self.seen: list[Any] = []

    def spend(self) -> None:
        self.measured.now_ns += 1_000_000

    def look(self) -> None:
        """All that hooks, values and the agent go by."""
        phases, steps = self.progress.phases, self.progress.steps
        self.seen.append(
            (
                phases.words[PHASE_WORD : PHASE_WORD + 4].tolist(),
                [getattr(steps, name) for name in steps.__slots__],
                steps.next(True),
            )
        )

    def run(self) -> list[Any]:
        chance = self.chance
        # Most programs repeat themselves.
        actions: list[Callable[[], None]] = [self.step] * chance.randrange(3, 30)
        actions += chance.choices(self.all_actions(), k=chance.randrange(1, 8))
        for _ in range(6):
            self.step()
        for _ in range(ACTIONS):
            chance.choice(actions)()
            self.spend()
            self.look()
        return self.end()

    def end(self) -> list[Any]:
        if self.phase is not None:
            self.progress.end(self.phase, 0.0)
        self.stepper.stop()
        with closing(JournalReader(self.measured.recorder.writer.path)) as reader:
            records = [each for each in reader.read() if isinstance(each, Steps)]
        words = [
            f"{word >> layout.CODE_SHIFT:x} {word & layout.WORD_VALUE}"
            for each in records
            for word in memoryview(each.words).cast("Q")
        ]
        totals = {name: round(value, 6) for name, value in self.measured.totals().items()}
        totals.pop("otel_ddp.hook.time", None)
        self.measured.close()
        return [*self.seen, *words, totals]

    # -- the actions

    def next_batch(self) -> torch.Tensor:
        act, self.when_loaded = self.when_loaded, self.spend
        act()
        return BATCH

    def all_actions(self) -> list[Callable[[], None]]:
        return [
            *(self.accumulate, self.accumulate_long, self.another_optimizer, self.backward_twice),
            *(self.callback_in_wait, self.checkpointed, self.closure, self.closure_after_backward),
            *(self.elsewhere, self.elsewhere_in_forward, self.elsewhere_within, self.evaluate),
            *(self.evaluate_with_gradients, self.evaluate_within, self.fill_state, self.flush),
            *(self.forward_alone, self.interrupt, self.load, self.load_late, self.load_long),
            *(self.load_twice, self.pair_of_outputs, self.raise_once),
            *(self.load_within_phase, self.log, self.log_a_step, self.log_between_batches),
            *(self.log_within, self.own_phase, self.phase_within, self.phase_in_backward),
            *(self.raise_in_backward, self.raise_in_forward, self.raise_then_go_on),
            *(self.smaller_batch, self.step_again, self.train_another, self.train_another_within),
            *(self.overflow, self.phase_in_forward, self.evaluate_elsewhere_then_again),
            *(self.train_elsewhere, self.two_models, self.vmapped, self.without_gradients),
        ]

    def loss(self, batch: torch.Tensor = BATCH) -> torch.Tensor:
        return self.model(batch).sum()

    def backward(self, loss: torch.Tensor) -> None:
        self.spend()
        loss.backward()
        self.spend()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward(self.loss())
        self.optimizer.step()
        self.seen.append(self.progress.flush_due_ns > self.measured.now_ns)

    def accumulate(self) -> None:
        self.backward(self.loss())

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.loss()
        self.model.train()

    def evaluate_with_gradients(self) -> None:
        self.model.eval()
        self.loss()
        self.model.train()

    def without_gradients(self) -> None:
        with torch.no_grad():
            self.loss()

    def evaluate_within(self) -> None:
        loss = self.loss()
        self.evaluate()
        self.backward(loss)
        self.evaluate()
        self.optimizer.step()

    def forward_alone(self) -> None:
        self.loss()

    def raise_in_forward(self) -> None:
        with suppress(ArithmeticError):
            self.model(BATCH, ArithmeticError)

    def interrupt(self) -> None:
        with suppress(KeyboardInterrupt):
            self.model(BATCH, KeyboardInterrupt)

    def raise_in_backward(self) -> None:
        self.model.raises_in_backward = True
        with suppress(ArithmeticError):
            self.backward(self.loss())
        self.model.raises_in_backward = False

    def raise_once(self) -> None:
        self.model.raises_in_backward = True
        loss = self.loss()
        with suppress(ArithmeticError):
            loss.backward(retain_graph=True)
        self.model.raises_in_backward = False
        self.backward(loss)
        self.optimizer.step()

    def pair_of_outputs(self) -> None:
        self.model.pair = True
        one, two = self.model(BATCH)
        self.model.pair = False
        two.register_hook(lambda _: self.a_phase())
        self.backward(one.sum() + two.sum())
        self.optimizer.step()

    def raise_then_go_on(self) -> None:
        loss = self.loss()
        self.raise_in_backward()
        self.backward(loss)
        self.optimizer.step()

    def train_another(self) -> None:
        self.stranger(BATCH).sum().backward()
        self.of_stranger.step()

    def train_another_within(self) -> None:
        def train(*_: Any) -> None:
            self.spend()
            self.of_stranger.step()
            self.spend()

        with self.optimizer.register_step_pre_hook(train):
            self.step()

    def two_models(self) -> None:
        self.backward(self.loss() + self.stranger(BATCH).sum())
        self.of_stranger.step()
        self.optimizer.step()

    def another_optimizer(self) -> None:
        self.step()
        SGD(self.model.parameters(), lr=0.0).step()

    def load(self) -> None:
        next(self.batches)
        self.step()

    def load_twice(self) -> None:
        next(self.batches)
        self.load()

    def load_within_phase(self) -> None:
        self.when_loaded = self.own_phase
        self.load()

    def load_late(self) -> None:
        self.backward(self.loss())
        next(self.batches)
        self.optimizer.step()

    def own_phase(self) -> None:
        if self.phase is None:
            self.phase = self.progress.begin("validation")
        else:
            self.progress.end(self.phase, 0.0)
            self.phase = None

    def phase_within(self) -> None:
        loss = self.loss()
        phase = self.progress.begin("penalty")
        self.backward(loss)
        self.progress.end(phase, 0.0)
        self.optimizer.step()

    def phase_in_backward(self) -> None:
        inputs = BATCH.clone().requires_grad_()
        inputs.register_hook(lambda _: self.a_phase())
        self.backward(self.loss() + self.loss(inputs))
        self.optimizer.step()

    def callback_in_wait(self) -> None:
        # Queued after ours: as DDP's finaliser is.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        inputs = BATCH.clone().requires_grad_()
        inputs.register_hook(lambda _: queue(self.a_phase))
        self.backward(self.loss(inputs))
        self.optimizer.step()

    def a_phase(self) -> None:
        self.spend()
        phase = self.progress.begin("penalty")
        self.spend()
        self.progress.end(phase, 0.0)
        self.spend()

    def log(self) -> None:
        self.measured.recorder.log({"loss": 1.0})

    def log_within(self) -> None:
        loss = self.loss()
        self.measured.recorder.log({"loss": 1.0})
        self.backward(loss)
        self.optimizer.step()

    def log_a_step(self) -> None:
        self.measured.recorder.log({"loss": 1.0}, step=self.progress.steps.count + 5)

    def log_between_batches(self) -> None:
        self.accumulate()
        self.log_a_step()
        self.step()

    def accumulate_long(self) -> None:
        for _ in range(40):
            self.accumulate()
            self.measured.now_ns += 20_000_000
        self.is_flushed()

    def load_long(self) -> None:
        for _ in range(40):
            next(self.batches)
            self.measured.now_ns += 20_000_000
        self.is_flushed()

    def is_flushed(self) -> None:
        # Looked at in every sixteenth.
        self.seen.append(self.measured.now_ns - self.progress.flush_due_ns < 16 * 25_000_000)

    def closure_after_backward(self) -> None:
        self.accumulate()
        self.evaluate()
        self.closure()

    def fill_state(self) -> None:
        self.optimizer.zero_grad()
        _init_optim_state(self.optimizer)

    def closure(self) -> None:
        def again() -> Any:
            loss = self.loss()
            self.backward(loss)
            return loss

        self.optimizer.step(again)

    def elsewhere(self) -> None:
        in_thread(self.evaluate)

    def evaluate_elsewhere_then_again(self) -> None:
        self.elsewhere()
        self.optimizer.step()
        self.phase_in_forward()

    def phase_in_forward(self) -> None:
        self.model.within = self.a_phase
        self.step()

    def overflow(self) -> None:
        # By a scaler that we are not given.
        scaler = torch.amp.GradScaler("cpu")
        self.optimizer.zero_grad()
        self.backward(scaler.scale(self.loss() * float("inf")))
        scaler.step(self.optimizer)
        scaler.update()

    def elsewhere_within(self) -> None:
        loss = self.loss()
        in_thread(self.loss)
        self.backward(loss)
        self.optimizer.step()

    def elsewhere_in_forward(self) -> None:
        self.model.within = lambda: in_thread(self.loss)
        self.step()

    def train_elsewhere(self) -> None:
        in_thread(lambda: (self.step(), self.step()))

    def backward_twice(self) -> None:
        loss = self.loss()
        loss.backward(retain_graph=True)
        self.backward(loss)
        self.optimizer.step()

    def flush(self) -> None:
        self.progress.flush()

    def step_again(self) -> None:
        self.optimizer.step()

    def smaller_batch(self) -> None:
        self.backward(self.loss(BATCH[:3]))
        self.optimizer.step()

    def vmapped(self) -> None:
        self.backward(torch.vmap(self.model)(BATCH.expand(2, 8, 4)).sum())
        self.optimizer.step()

    def checkpointed(self) -> None:
        inputs = BATCH.clone().requires_grad_()
        self.backward(checkpoint(self.model, inputs, use_reentrant=False).sum())
        self.optimizer.step()


def in_thread(act: Callable[[], Any]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def measured_in(place: Path, seed: int, usual: bool) -> list[Any]:
    place.mkdir()
    return Program(place, seed, usual).run()


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each forward: whether it began a usual step."""
    found: list[bool] = []
    hook, otherwise = model_hooks.before_forward, unusual.before_forward

    def before_forward(*given: Any) -> None:
        found.append(True)
        hook(*given)

    def before_unusual(*given: Any) -> None:
        found[-1] = False
        otherwise(*given)

    monkeypatch.setattr(model_hooks, "before_forward", before_forward)
    monkeypatch.setattr(unusual, "before_forward", before_unusual)
    return found


def test_programs_are_measured_alike(
    tmp_path: Path, began: list[bool], caplog: pytest.LogCaptureFixture, request: Any
) -> None:
    caplog.set_level("ERROR", logger="otel_ddp")
    # What a collection takes is told with its step.
    gc.disable()
    request.addfinalizer(gc.enable)
    for seed in range(PROGRAMS):
        found = [measured_in(tmp_path / f"{seed}-{way}", seed, way) for way in (True, False)]
        assert found[0] == found[1], seed

    assert sum(began) > PROGRAMS * 10


@pytest.mark.parametrize("way", ["exported", "traced"])
def test_a_model_that_is_traced_after_usual_steps_makes_none(
    tmp_path: Path, began: list[bool], way: str
) -> None:
    program = Program(tmp_path, 0, True)
    for _ in range(6):
        program.step()
    samples = program.progress.work.samples

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way == "exported":
            torch.export.export(program.model, (BATCH,), strict=False)
        else:
            torch.jit.trace(program.model, BATCH)
    program.step()

    assert program.progress.work.samples == samples + len(BATCH)
    program.end()
    assert any(began)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_after_a_backward_is_a_part_of_its_step(tmp_path: Path, by_name: bool) -> None:
    measured = Measured(tmp_path)
    model = Slow(measured)
    optimizer = SGD(model.parameters(), lr=0.01)
    measured.instrument(model)

    def closure() -> torch.Tensor:
        loss = model(BATCH).mean()
        loss.backward()
        return loss

    for number in range(9):
        closure()
        if number < 6:
            optimizer.step()
        elif by_name:
            optimizer.step(closure=closure)
        else:
            optimizer.step(closure)

    totals = measured.totals()
    measured.close()
    assert (totals["training.steps"], totals["training.micro_batches"]) == (9, 12)
    assert (totals["forward"], totals["backward"]) == (12, 24)


def test_each_of_several_fits_has_usual_steps(tmp_path: Path, began: list[bool]) -> None:
    measured = Measured(tmp_path)
    measure.start(None, measured.progress, lambda _: None)
    # A search may keep what it has trained: the last optimizer is still there.
    kept = []
    for _ in range(3):
        model = nn.Linear(4, 4)
        optimizer = SGD(model.parameters(), lr=0.01)
        kept.append((model, optimizer))
        for _ in range(40):
            model(BATCH).mean().backward()
            optimizer.step()
        assert began[-1]
    measured.close()


def test_an_encoder_and_its_decoder_work_on_one_batch(tmp_path: Path, began: list[bool]) -> None:
    measured = Measured(tmp_path)
    measure.start(None, measured.progress, lambda _: None)
    encoder, decoder = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = SGD([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    for step in range(40):
        optimizer.zero_grad()
        hidden = encoder(BATCH)
        (decoder(hidden) if step % 3 else hidden).sum().backward()
        optimizer.step()

    assert measured.progress.work.samples == 40 * len(BATCH)
    assert any(began)
    measured.close()


def test_an_error_of_ours_at_the_end_of_a_usual_step_is_no_users(
    tmp_path: Path, began: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(errors, "raise_failures", False)
    program = Program(tmp_path, 0, True)
    for _ in range(6):
        program.step()
    program.backward(program.loss())
    clock: Any = SimpleNamespace(mark=lambda word: None, step_finished=lambda: None)
    program.progress.phases.device_clock = clock  # it takes no arguments

    program.optimizer.step()

    assert began[-1]
    assert errors.failures == {"after the optimizer": 1}
    program.progress.phases.device_clock = None
    program.end()


def test_a_model_that_is_gone_is_not_kept_by_hooks_of_its_own(
    tmp_path: Path, began: list[bool]
) -> None:
    class Bound(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 1)
            self.register_forward_pre_hook(self.look)

        def look(self, *_: Any) -> None:
            pass

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    measured = Measured(tmp_path)
    try:
        ddp = DistributedDataParallel(Bound())
        inner = ref(ddp.module)
        measured.instrument(ddp)
        optimizer = SGD(ddp.parameters(), lr=0.01)
        for _ in range(6):
            ddp(BATCH).sum().backward()
            optimizer.step()
        del ddp, optimizer
        gc.collect()
        assert inner() is None

        # One without DDP comes after it.
        model = nn.Linear(4, 1)
        measured.instrument(model)
        optimizer = SGD(model.parameters(), lr=0.01)
        for _ in range(6):
            model(BATCH).sum().backward()
            optimizer.step()
        assert errors.failures == {}
        assert began[-1]
    finally:
        measured.close()
        dist.destroy_process_group()
