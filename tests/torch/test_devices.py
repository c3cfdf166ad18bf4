"""What is known of devices: which they are, what torch's allocator counts, and their peaks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import otel_ddp
from conftest import Here
from otel_ddp.torch.readings.devices import gpu_facts, memory
from otel_ddp.torch.readings.flops import peak
from otel_ddp.vocabulary import catalog

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


def properties(device: torch.device) -> Any:
    return SimpleNamespace(uuid=f"8932f937-{device.index}")


def test_each_board_once_also_where_torch_knows_no_uuid() -> None:
    # The agent reads no Intel GPU.
    assert gpu_facts([CPU, SECOND, FIRST, SECOND, XPU], properties) == {
        "boards": [{"index": 0, "uuid": "8932f937-0"}, {"index": 1, "uuid": "8932f937-1"}]
    }
    assert gpu_facts([SECOND], lambda _: SimpleNamespace(name="GPU")) == {
        "boards": [{"index": 1, "uuid": ""}]
    }


# -- the allocator


XPU = torch.device("xpu", 1)


def statistics() -> dict[str, int]:
    """A part of what torch has, with numbers that cannot be mistaken for one another."""
    found = {"num_alloc_retries": 4, "num_ooms": 5}
    for first, what in ((100, "allocated_bytes"), (200, "reserved_bytes"), (300, "active_bytes")):
        for after, pool in ((0, "all"), (10, "large_pool")):
            for number, when in enumerate(("current", "peak", "freed"), first + after):
                found[f"{what}.{pool}.{when}"] = number
    return found


class FakeModule:
    """What torch.cuda, torch.xpu and their like offer."""

    Event = torch.Event

    def __init__(self) -> None:
        self.found: Any = statistics()
        self.asked: list[Any] = []
        self.initialized = True
        self.backend = "native"

    def is_initialized(self) -> bool:
        return self.initialized

    def memory_stats(self, device: Any) -> Any:
        assert self.initialized, "this would have made a context"
        self.asked.append(device)
        if isinstance(self.found, Exception):
            raise self.found
        return self.found

    def get_allocator_backend(self) -> str:
        return self.backend

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(total_memory=1000)


@pytest.fixture
def module() -> FakeModule:
    return FakeModule()


WHOLE = {
    catalog.TRAINING_DEVICE_MEMORY_ALLOCATED: 100,
    catalog.TRAINING_DEVICE_MEMORY_RESERVED: 200,
    catalog.TRAINING_DEVICE_MEMORY_PEAK: 101,
    catalog.TRAINING_DEVICE_MEMORY_ALLOC_RETRIES: 4,
    catalog.TRAINING_OOMS: 5,
    catalog.TRAINING_DEVICE_MEMORY_LIMIT: 1000,
}


def read(module: Any, device: torch.device = XPU) -> dict[catalog.Metric, int]:
    return memory(device, module=lambda _: module)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "cpu", "meta", "mps"])
def test_the_real_module_is_not_initialised_by_reading(kind: str) -> None:
    assert memory(torch.device(kind)) == {}
    assert not torch.cuda.is_initialized()
    assert not torch.xpu.is_initialized()


@pytest.mark.parametrize("known", ["not in use", "maybe in use"])
def test_a_device_that_may_not_be_in_use_is_not_asked(module: FakeModule, known: str) -> None:
    module.initialized = False
    asked = module if known == "not in use" else SimpleNamespace(memory_stats=module.memory_stats)

    assert read(asked) == {}
    assert module.asked == []


@pytest.mark.parametrize(
    ("more", "limit"),
    [
        # The share of the device that the program has set.
        ({"get_per_process_memory_fraction": lambda device: 0.25}, 250),
        # It does not tell its size.
        ({"get_device_properties": lambda device: None}, None),
    ],
)
def test_the_limit_is_what_the_program_may_take(
    module: FakeModule, more: dict[str, Any], limit: int | None
) -> None:
    vars(module).update(more)

    found = read(module)

    assert found.get(catalog.TRAINING_DEVICE_MEMORY_LIMIT) == limit
    assert found[catalog.TRAINING_DEVICE_MEMORY_ALLOCATED] == 100


@pytest.mark.parametrize(
    "answer",
    [{}, None, RuntimeError("does not yet support getDeviceStats"), AttributeError("no such")],
)
def test_an_allocator_that_tells_nothing_has_no_reading(module: FakeModule, answer: Any) -> None:
    module.found = answer

    assert read(module) == {}


def train_on_the_module_of_meta(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` is a device that torch trains on everywhere, and has no module for."""
    monkeypatch.setattr(torch, "meta", module, raising=False)
    model = torch.nn.Linear(4, 1, device="meta")
    otel_ddp.instrument(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.ones(2, 4, device="meta")).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("backend", "reasons"),
    [
        ("native", ("", "")),
        ("cudaMallocAsync", ("", "no_counts")),
        ("", ("no_statistics", "no_statistics")),
    ],
)
def test_the_memory_of_any_type_of_device_is_recorded(
    place: Here,
    module: FakeModule,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    reasons: tuple[str, str],
) -> None:
    module.backend = backend
    train_on_the_module_of_meta(module if backend else None, monkeypatch)

    journal = place.only()
    capability = journal.facts["capability"]
    assert (capability["memory"], capability["out_of_memory"]) == reasons
    if reasons == ("", ""):
        assert {metric: journal.total(metric) for metric in WHOLE} == WHOLE
    sentence = "memory, out_of_memory (torch has no statistics of this device's allocator)"
    assert journal.facts["not_measured"].count(sentence) == (not backend)


# -- peaks


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200", "float8", 1978.9),
        ("NVIDIA A100-SXM4-80GB", "tf32", 156),
        ("A100-SXM4-40GB", "float32", 19.5),
        ("NVIDIA L40S", "bfloat16", 362.05),
        ("Tesla V100-SXM2-32GB", "float16", 125),
        ("Tesla T4", "float16", 65),
        ("NVIDIA GB200", "bfloat16", 2500),
        ("NVIDIA GeForce RTX 4090", "bfloat16", 165.2),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        # What is only like one of them.
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("NVIDIA H100", "bfloat16", None),
        ("NVIDIA GeForce RTX 3090 Ti", "bfloat16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("NVIDIA A40-48Q", "bfloat16", None),
        ("", "bfloat16", None),
        # What it does not compute with.
        *(("Tesla V100-SXM2-16GB", dtype, None) for dtype in ("bfloat16", "tf32", "float8")),
        *(("Tesla V100-SXM2-16GB", dtype, None) for dtype in ("float64", "int8", "", "count")),
    ],
)
def test_a_device_has_the_peak_of_its_data_sheet(name: str, dtype: str, tera: float | None) -> None:
    assert peak(name, dtype) == (None if tera is None else pytest.approx(tera * 1e12))
