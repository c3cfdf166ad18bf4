"""The inputs and outputs of models are read without running the user's code."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from otel_ddp.torch import inspection
from otel_ddp.torch.hooks.model import differentiable
from otel_ddp.torch.steps.watched_model import workload

INPUT = torch.ones(8, 4)
WORDS = torch.ones(2, 5, dtype=torch.long)
EDGES = torch.ones(2, 300, dtype=torch.long)


def never(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("this is the user's code")


class Hostile(dict[str, Any]):
    __iter__ = __getitem__ = __len__ = get = items = keys = values = never  # type: ignore[assignment]
    __class__ = property(never)  # type: ignore[assignment]


class HostileList(list[Any]):
    __iter__ = __getitem__ = __len__ = never  # type: ignore[assignment]


class HostileTuple(tuple[Any, ...]):
    __iter__ = __getitem__ = __len__ = never  # type: ignore[assignment]


class HostileObject:
    def __init__(self, **content: Any) -> None:
        object.__getattribute__(self, "__dict__").update(content)

    __getattribute__ = never
    __class__ = property(never)  # type: ignore[assignment]


class HostileTensor(torch.Tensor):
    __torch_function__ = classmethod(never)  # type: ignore[assignment]
    shape = dtype = requires_grad = grad_fn = property(never)  # type: ignore[assignment]


def test_reading_an_output_runs_no_code_of_the_user() -> None:
    loss = torch.ones((), requires_grad=True) * 1
    strange = torch.ones(2, requires_grad=True).as_subclass(HostileTensor)

    for output in (
        Hostile(loss=loss),
        HostileList([loss]),
        HostileTuple((loss,)),
        HostileObject(loss=loss),
        (Hostile(a=HostileList([loss])),),
    ):
        (found,) = differentiable(output)
        assert found is loss
    assert len(list(differentiable([strange, HostileObject(loss=strange)]))) == 1
    assert inspection.of_tensor(strange, "grad_fn") is not None
    assert workload((Hostile(input_ids=WORDS),), {}) == (2, 10)
    assert workload((strange, 1), {}) == (2, 0)


BOXES = [torch.zeros(2)] * 100


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: {"loss": x, "boxes": BOXES, "masks": BOXES},
        lambda x: {"boxes": BOXES, "loss": x},
        lambda x: (BOXES, {"losses": [x]}),
        lambda x: [x, *BOXES],
        lambda x: HostileObject(loss=x, boxes=BOXES),
    ],
    ids=["dict", "dict, last", "deeper", "list", "object"],
)
def test_a_loss_is_found_among_very_many_values(wrap: Callable[[Any], Any]) -> None:
    loss = torch.ones((), requires_grad=True) * 1

    (found,) = differentiable(wrap(loss))

    assert found is loss


@pytest.mark.parametrize(
    ("batch", "counted"),
    [
        (INPUT, (8, 0)),
        (WORDS, (2, 10)),
        (WORDS.int(), (2, 10)),
        (INPUT.to(torch.cfloat), (8, 0)),
        (INPUT.bool(), (8, 0)),
        ({"mask": WORDS.bool(), "input_ids": WORDS}, (2, 10)),
        (UserDict(input_ids=WORDS, attention_mask=WORDS), (2, 10)),
        ((INPUT, INPUT), (8, 0)),
        # As sentence-transformers does: questions, answers, and answers that are wrong.
        ([{"input_ids": WORDS, "attention_mask": WORDS}, UserDict(input_ids=WORDS)], (2, 20)),
        ([{"pixels": INPUT}, {"input_ids": WORDS}], (8, 10)),
        ([], (0, 0)),
        # Beside fractions, whole numbers are tokens by name alone.
        ({"x": INPUT, "edge_index": EDGES}, (8, 0)),
        ({"x": INPUT, "labels": WORDS}, (8, 0)),
        ({"mask": INPUT, "input_ids": WORDS}, (2, 10)),
        ({"input_ids": WORDS.flatten(), "cu_seqlens": torch.ones(3).int()}, (0, 10)),
        (WORDS.flatten(), (10, 0)),
    ],
)
def test_only_integers_are_tokens(batch: Any, counted: tuple[int, int]) -> None:
    assert workload((batch,), {}) == counted
    assert workload((batch, 1), {}) == counted
    assert workload((), {"batch": batch}) == counted


def test_what_a_batch_is_made_of_may_come_as_several_arguments() -> None:
    assert workload((INPUT, torch.ones(8, 20, dtype=torch.long)), {}) == (8, 0)
    assert workload((EDGES, INPUT), {}) == (8, 0)
    assert workload((WORDS, WORDS), {}) == (2, 10)
    assert workload((WORDS, torch.ones(2)), {"tokens": WORDS[:1]}) == (1, 5)
