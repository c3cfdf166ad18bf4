"""Our hooks on modules: none is left behind, and models are saved, copied and traced as ever."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import otel_ddp
from conftest import Here, Journal
from extras import newer_torch
from loops import INPUT, train
from otel_ddp import errors
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.vocabulary import catalog


def learn(model: nn.Module, steps: int = 1) -> None:
    train(model, SGD(model.parameters(), lr=0.01), steps)


def hooks(module: nn.Module) -> int:
    kinds = ("_forward_pre_hooks", "_forward_hooks")
    more = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called")
    return sum(len(getattr(module, kind)) for kind in (*kinds, *more))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_wrapper_left_in_evaluation_mode_trains_as_its_model_does(
    place: Here, alone: None, compiled: bool
) -> None:
    """As who sets the modes of the model alone leaves it."""
    inner = nn.Linear(4, 1)
    model: nn.Module = DistributedDataParallel(inner)
    model = torch.compile(model, backend="eager") if compiled else model
    model.eval()
    inner.train()
    otel_ddp.instrument(model)

    learn(model, 3)
    otel_ddp.finish()

    journal = place.only()
    assert journal.total(catalog.TRAINING_MICRO_BATCHES) == 3
    assert journal.total(catalog.TRAINING_SAMPLES) == 24


def test_a_module_that_is_wrapped_again_and_again_has_hooks_once(place: Here, alone: None) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    for _ in range(5):
        model = DistributedDataParallel(inner)
        otel_ddp.instrument(model)
        learn(model)
        # Dropped and collected, so that the next one may well lie in its place.
        del model
        gc.collect()

    assert hooks(inner) == 4
    otel_ddp.uninstrument()
    assert hooks(inner) == 0
    otel_ddp.finish()
    assert place.only().total(catalog.TRAINING_STEPS) == 5


def test_an_output_that_is_the_same_each_time_gets_one_hook(place: Here) -> None:
    weights = torch.ones(4, requires_grad=True)
    kept = weights * 2
    model = nn.Identity()
    otel_ddp.instrument(model)
    calls: list[Any] = []
    stepper = model_hooks._stepper
    assert stepper is not None
    for _ in range(50):
        output = model(kept)
    # Each hook that the node has is called at its gradient.
    hook = stepper.backward_hook.hook
    stepper.backward_hook.call(lambda gradient: (calls.append(1), hook(gradient))[1])
    output.sum().backward()
    for _ in range(3):
        model(weights * 3).sum().backward()

    assert len(calls) == 4
    otel_ddp.finish()
    assert place.only().total(catalog.TRAINING_MICRO_BATCHES) == 4


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_a_scripted_model_gets_a_warning_and_no_hooks(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    errors.raise_failures = False
    model = torch.jit.script(nn.Linear(4, 1))

    otel_ddp.instrument(model)
    otel_ddp.instrument(model).log({"loss": 1.0})
    learn(model)

    (said,) = caplog.records
    assert "RecursiveScriptModule" in said.getMessage()
    assert said.exc_info is None
    assert place.only().points == [("loss", 1.0)]


def test_a_graph_of_an_earlier_run_is_of_no_later_one(place: Here) -> None:
    model = nn.Linear(4, 1)
    otel_ddp.instrument(model)
    learn(model)
    older = model(INPUT).sum()
    otel_ddp.finish()
    earlier = set(place.journals())
    otel_ddp.instrument(model)

    learn(model, 3)
    older.backward()
    otel_ddp.finish()

    (path,) = set(place.journals()) - earlier
    totals = {each.metric: each.values[0] for each in Journal(path).all_totals}
    assert totals["training.micro_batches"] == 3


def test_a_scaler_is_freed_once_the_run_is_over(place: Here) -> None:
    model, scaler = nn.Linear(4, 1), torch.amp.GradScaler("cpu")
    optimizer = SGD(model.parameters(), lr=0.01)
    otel_ddp.instrument(model, scaler=scaler)
    scaler.scale(model(INPUT).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    otel_ddp.finish()

    held = ref(scaler)
    del scaler
    gc.collect()

    assert held() is None


def test_a_model_that_is_gone_is_not_kept_by_hooks_of_its_own(place: Here, alone: None) -> None:
    class Bound(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 1)
            self.register_forward_pre_hook(self.look)

        def look(self, *_: Any) -> None:
            pass

    ddp = DistributedDataParallel(Bound())
    inner = ref(ddp.module)
    otel_ddp.instrument(ddp)
    learn(ddp, 6)
    del ddp
    gc.collect()
    assert inner() is None

    # One without DDP comes after it.
    model = nn.Linear(4, 1)
    otel_ddp.instrument(model)
    learn(model, 6)
    otel_ddp.finish()
    assert place.only().total(catalog.TRAINING_STEPS) == 12


# -- saved, loaded, copied and traced as one that is not watched


@pytest.fixture
def model(place: Here) -> Iterator[nn.Module]:
    model = nn.Linear(4, 1)
    otel_ddp.instrument(model)
    train(model, SGD(model.parameters(), lr=0.1), 1)
    yield model
    otel_ddp.finish()


@newer_torch("safe_globals")
def test_a_model_is_loaded_with_weights_only_and_where_we_are_not_installed(
    model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.pt"

    torch.save(model, path)

    with torch.serialization.safe_globals([nn.Linear]):
        loaded = torch.load(path)
    assert torch.equal(model(INPUT), loaded(INPUT))
    with monkeypatch.context() as gone:
        for name in [each for each in sys.modules if each.partition(".")[0] == "otel_ddp"]:
            gone.setitem(sys.modules, name, None)
        loaded = torch.load(path, weights_only=False)
    assert torch.equal(model(INPUT), loaded(INPUT))


def test_copies_have_the_users_hooks_alone(model: nn.Module) -> None:
    heard = model.register_forward_hook(_users, with_kwargs=True, always_call=True)

    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]

    for each in copies:
        assert list(each._forward_hooks.values()) == [_users]
        assert each._forward_hooks_with_kwargs.keys() == each._forward_hooks.keys()
        assert each._forward_hooks_always_called.keys() == each._forward_hooks.keys()
        assert not each._forward_pre_hooks
        assert not each._forward_pre_hooks_with_kwargs
        assert each.__dict__.keys() == nn.Linear(4, 1).__dict__.keys()
    heard.remove()
    assert _users not in model._forward_hooks.values()


def _users(*args: object) -> None:
    pass


def test_nothing_is_left_on_a_model_that_is_watched_no_more(model: nn.Module) -> None:
    otel_ddp.uninstrument()

    assert model.__dict__.keys() == nn.Linear(4, 1).__dict__.keys()


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning"
)
def test_a_model_that_is_watched_can_be_traced(model: nn.Module) -> None:
    traced = torch.jit.trace(model, INPUT)

    assert torch.equal(model(INPUT), traced(INPUT))


@newer_torch("export of a model with hooks")
def test_a_model_that_is_watched_can_be_exported(model: nn.Module) -> None:
    exported = torch.export.export(model, (INPUT,)).module()

    assert torch.equal(model(INPUT), exported(INPUT))


class CopiesItself(nn.Linear):
    """As classes that set up what they have copied: of all attributes, our hooks too."""

    def __deepcopy__(self, memo: dict[int, object]) -> CopiesItself:
        made = type(self).__new__(type(self))
        kept = {name: value for name, value in self.__dict__.items() if name != "__getstate__"}
        made.__dict__.update(copy.deepcopy(kept, memo))
        return made


def test_a_copy_that_a_class_makes_itself_can_be_pickled(place: Here) -> None:
    model = CopiesItself(4, 1)
    otel_ddp.instrument(model)

    loaded = pickle.loads(pickle.dumps(copy.deepcopy(model)))

    assert torch.equal(model(INPUT), loaded(INPUT))
    otel_ddp.finish()
