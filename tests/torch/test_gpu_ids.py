"""What a rank records of the GPUs that its model lies on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import otel_ddp
from conftest import Here
from otel_ddp.torch.readings.devices import gpu_facts

ENV = {"CUDA_VISIBLE_DEVICES": "3,4", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "HOME": "/root"}
CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def properties(device: torch.device) -> Any:
    return SimpleNamespace(uuid=f"8932f937-{device.index}")


def test_each_board_once_with_what_chose_it() -> None:
    assert gpu_facts([CPU, SECOND, FIRST, SECOND], ENV, properties) == {
        "boards": [{"index": 0, "uuid": "8932f937-0"}, {"index": 1, "uuid": "8932f937-1"}],
        "visible": {"CUDA_VISIBLE_DEVICES": "3,4", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
    }


def test_a_torch_that_knows_no_uuid_still_says_which_index() -> None:
    found = gpu_facts([SECOND], {}, lambda _: SimpleNamespace(name="GPU"))

    assert found == {"boards": [{"index": 1, "uuid": ""}], "visible": {}}


def test_a_model_on_the_processor_asks_nothing_of_cuda(
    place: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(*args: Any) -> Any:
        raise AssertionError("nothing of CUDA may begin here")

    monkeypatch.setattr(torch.cuda, "get_device_properties", asked)
    monkeypatch.setattr(torch.cuda, "_lazy_init", asked)
    model = torch.nn.Linear(4, 1)
    otel_ddp.instrument(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    assert "boards" not in place.only().facts
