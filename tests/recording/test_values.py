"""What becomes a number, what becomes a name, and what a configuration turns into."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import math
import warnings
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from odd_values import Rude, on_device
from otel_ddp.recording import values

torch = pytest.importorskip("torch")


class Phase(enum.IntEnum):
    WARM = 3


GOOD = {
    "huge int": (2**70, 2.0**70),
    "enum": (Phase.WARM, 3.0),
    "decimal": (Decimal("0.5"), 0.5),
    "numpy float32": (np.float32(0.5), 0.5),
    "numpy bool": (np.bool_(True), 1.0),
    "torch (1,)": (torch.tensor([1.5]), 1.5),
    "torch bfloat16": (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
    "torch int64": (torch.tensor(2**40), 2.0**40),
    "negative zero": (-0.0, -0.0),
    "infinite": (math.inf, math.inf),
}


@pytest.mark.parametrize("given", GOOD)
def test_every_value_that_is_one_number_becomes_a_float(given: str) -> None:
    value, expected = GOOD[given]

    found = values.number(value)

    assert type(found) is float
    assert (expected, math.copysign(1, expected)) == (found, math.copysign(1, found))


BAD = {
    "None": (None, "got None"),
    "text": ("0.5", "got '0.5'"),
    "complex": (1j, "complex"),
    "torch complex": (torch.tensor(1j), "complex"),
    "two elements": (torch.zeros(2), r"got 2 \(shape \(2,\)\)"),
    "array of text": (np.array("0.5"), "a number was expected"),
    "meta": (torch.zeros((), device="meta"), "got a tensor on meta"),
    "rude": (Rude(), "got <Rude>"),
    "beyond floats": (2**2000, "larger than any float"),
    "device": (on_device(), "got a tensor on cuda:0"),
}


@pytest.mark.parametrize("given", BAD)
def test_what_is_no_number_is_refused_with_the_reason(given: str) -> None:
    value, reason = BAD[given]

    with pytest.raises(values.Refused, match=reason):
        values.number(value)


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        *(("train", "train"), ("training", "train"), ("TRAIN", "train")),
        *(("val", "val"), ("validate", "val"), ("validation", "val"), ("eval", "val")),
        *(("evaluation", "val"), ("test", "test"), ("testing", "test")),
        *(("calibration", "calibration"), ("OOD", "OOD")),
    ],
)
def test_synonyms_of_a_split_are_one_and_other_words_are_kept(split: str, expected: str) -> None:
    assert expected == values.split_of("loss", split)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("loss", "train"), ("val/loss", "val"), ("eval_loss", "val"), ("test.acc", "test")),
        *(("validation/acc", "val"), ("value/x", "train"), ("testimony", "train")),
    ],
)
def test_without_a_split_the_prefix_of_the_name_decides(name: str, expected: str) -> None:
    assert expected == values.split_of(name, None)


# -- configurations


@dataclasses.dataclass
class Optimizer:
    lr: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)


def test_a_nested_configuration_becomes_dotted_names() -> None:
    given = {
        "model": {"layers": 2, "bias": False},
        "optimizer": Optimizer(),
        "arguments": argparse.Namespace(seed=1, out=Path("/data")),
        "shard": np.int64(3),
        "scale": torch.tensor(0.5),
        "infinite": np.float64("inf"),
        "nothing": None,
        "empty": {},
        7: "seven",
    }

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = values.flat(given)

    expected = {
        "model.layers": 2,
        "model.bias": False,
        "optimizer.lr": 0.1,
        "optimizer.betas": "(0.9, 0.95)",
        "arguments.seed": 1,
        "arguments.out": "/data",
        "shard": 3,
        "scale": 0.5,
        "infinite": "inf",
        "nothing": None,
        "empty": "{}",
        "7": "seven",
    }
    assert expected == found
    assert expected == json.loads(json.dumps(found, allow_nan=False))


def test_a_huge_configuration_is_bounded() -> None:
    novel = "x" * 2**16

    found = values.flat({f"key{i}" * 100: novel if i < 100 else "x" for i in range(2500)})

    assert len(found) == 2000
    assert max(map(len, found)) <= 200
    assert {1, 1000} == {len(value) for value in found.values()}


def test_an_object_in_a_configuration_is_the_same_in_each_launch() -> None:
    def schedule() -> None: ...

    class Sampler:
        pass

    found = values.flat({"schedule": schedule, "sampler": Sampler(), "kind": Sampler, "len": len})

    assert found["len"] == "<built-in function len>"
    place = "test_an_object_in_a_configuration_is_the_same_in_each_launch.<locals>"
    assert found["schedule"] == f"<function {place}.schedule>"
    assert found["sampler"] == f"<{__name__}.{place}.Sampler object>"
    assert found["kind"] == f"<class '{__name__}.{place}.Sampler'>"


def test_what_raises_in_a_configuration_costs_nothing_else() -> None:
    assert values.flat({"rude": Rude(), Rude(): 1, "lr": 0.1}) == {
        "rude": "<Rude>",
        "<Rude>": 1,
        "lr": 0.1,
    }


def test_showing_a_value_never_asks_a_device() -> None:
    tensor = on_device()
    given = {"plain": tensor, "inside": [tensor, {"deep": (tensor,)}]}

    found = values.flat(given)

    assert found["plain"] == "a tensor on cuda:0"
    assert found["inside"].count("a tensor on cuda:0") == 2
    assert values.shown(list(given.values()), 200).count("a tensor on cuda:0") - 1 == 2
    assert values.attributes({"x": tensor}) == {"x": "a tensor on cuda:0"}


def test_showing_a_huge_value_is_cheap_and_short() -> None:
    class Counted(list[int]):
        seen = 0

        def __iter__(self) -> Iterator[int]:
            for value in super().__iter__():
                Counted.seen += 1
                yield value

    for huge in ("x" * 2**24, b"x" * 2**24, Counted(range(10**6)), 10**5000):
        assert len(values.shown(huge)) <= 60
        assert len(values.plain(huge, 200)) <= 200
    assert Counted.seen < 1000
