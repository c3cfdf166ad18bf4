"""Our hooks on modules: none is left behind, and models are saved, copied and traced as ever."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import otel_ddp
from conftest import Here
from extras import newer_torch
from loops import INPUT, train
from otel_ddp import errors
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
