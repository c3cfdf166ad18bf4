"""A model that is watched is saved, loaded, copied and traced as one that is not."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

import otel_ddp
from conftest import Here
from extras import newer_torch
from loops import INPUT, train


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
