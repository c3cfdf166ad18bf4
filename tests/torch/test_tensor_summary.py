"""The summary of a tensor: the same numbers as torch's own, and what has none."""

from __future__ import annotations

import pytest
import torch

import otel_ddp
from conftest import Here
from otel_ddp.torch.tensor_summary import NoSummary, summary

NAMES = ["min", "max", "mean", "std", "p05", "p25", "p50", "p75", "p95"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_numbers_are_torchs_own(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = torch.randn(64, 33).to(dtype)
    exact = tensor.double()

    found = {name: value.double().item() for name, value in summary(tensor).items()}

    assert list(found) == NAMES
    quantiles = torch.quantile(exact, torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95]).double())
    expected = [exact.min(), exact.max(), exact.mean(), exact.std(correction=0), *quantiles]
    # The standard deviation has the digits of the tensor's type.
    assert found.pop("std") == pytest.approx(expected.pop(3).item(), rel=torch.finfo(dtype).eps)
    assert list(found.values()) == pytest.approx([each.item() for each in expected], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_values_that_lie_close_together_keep_their_standard_deviation(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = (1 + torch.randn(10_000) * 0.001).to(dtype)

    found = summary(weights)["std"].item()

    assert found == pytest.approx(weights.double().std(correction=0).item(), rel=0.01)


def test_quantiles_of_a_large_tensor_are_those_of_every_nth_value() -> None:
    large = torch.linspace(0, 1, 1_000_001)

    found = {name: float(value) for name, value in summary(large).items()}

    assert found["p95"] == pytest.approx(0.95, abs=1e-3)
    assert (found["min"], found["max"]) == (0, 1)


def test_nothing_of_it_needs_a_gradient_or_changes_the_tensor() -> None:
    weight = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        within = summary(torch.ones(3))

    assert not any(value.requires_grad for value in summary(weight).values())
    assert not any(value.is_inference() for value in within.values() if value.numel() > 1)
    assert weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_no_value_is_asked_for_on_the_way(dtype: torch.dtype) -> None:
    # Tensors without values raise where one is asked for, as a device would have to be waited for.
    found = summary(torch.empty(300, 300, device="meta", dtype=dtype))

    assert list(found) == NAMES
    assert {(each.device.type, each.shape) for each in found.values()} == {("meta", ())}


@pytest.mark.parametrize(
    "wrong",
    [
        [1.0],
        torch.empty(0),
        torch.ones(2, dtype=torch.complex64),
        torch.ones(2, 2).to_sparse(),
        torch.empty(2, device="meta"),
    ],
)
def test_what_has_no_summary_is_refused_and_never_raises(wrong: object, place: Here) -> None:
    with otel_ddp.init() as run:
        run.log_tensor("weight", wrong)

    assert place.only().values == {}
    if not isinstance(wrong, torch.Tensor) or wrong.device.type != "meta":
        with pytest.raises(NoSummary):
            summary(wrong)


def test_a_summary_is_logged_as_values_of_one_step(place: Here) -> None:
    with otel_ddp.init() as run:
        run.log_tensor("fc/weight", torch.tensor([1.0, 3.0]), step=7, split="val")

    journal = place.only()
    assert (journal.values["fc/weight/min"], journal.values["fc/weight/mean"]) == (1.0, 2.0)
    assert list(journal.values) == [f"fc/weight/{name}" for name in NAMES]
    assert {call.step for call in journal.calls} == {7}
    assert set(journal.splits().values()) == {"val"}
