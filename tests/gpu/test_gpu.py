"""What must be true on a real GPU, and can be seen on no other device: docs/gpu.md."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.optim import SGD  # noqa: E402

import otel_ddp  # noqa: E402
from conftest import Here, Journal  # noqa: E402
from node import Node  # noqa: E402
from otel_ddp.vocabulary import catalog  # noqa: E402

pytestmark = pytest.mark.gpu

CYCLES = 20_000_000  # about 10 ms at the clocks of today


@pytest.fixture(autouse=True)
def _gpu() -> None:
    # Asked when a test runs, not when it is collected: the question alone may touch the driver.
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")


def inputs() -> torch.Tensor:
    return torch.ones(32, 64, device="cuda")


def train(model: nn.Module, optimizer: Any, batch: torch.Tensor, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()


def test_nothing_waits_for_the_device(run: otel_ddp.Run) -> None:
    model, batch = nn.Linear(64, 1).cuda(), inputs()
    optimizer = SGD(model.parameters(), lr=0.001)
    # What torch loads at its first step is no part of ours.
    train(model, optimizer, batch, 3)
    torch.cuda.synchronize()
    otel_ddp.instrument(model)
    # A kernel is loaded when it is first launched, and the device may be waited for.
    run.log({"weight/max": next(model.parameters()).max()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(5):
            torch.cuda._sleep(15 * CYCLES)
            train(model, optimizer, batch, 1)
        run.log({"weight/max": next(model.parameters()).max()})
    finally:
        torch.cuda.set_sync_debug_mode("default")
    last = torch.cuda.Event()
    last.record()

    # Five steps of 150 ms are launched long before the first of them is done.
    assert not last.query()


@pytest.fixture
def node() -> Iterator[Node]:
    """For programs that begin without CUDA, or leave something behind."""
    with Node(OTEL_DDP_AGENT="off") as opened:
        yield opened


def journals(node: Node) -> dict[str, Journal]:
    """What each rank wrote."""
    found = [Journal(path) for path in node.place.journals()]
    return {journal.identity["global_rank"]: journal for journal in found}


def spent(journal: Journal, name: str) -> float:
    return journal.total(catalog.TRAINING_PHASE_TIME, phase=name, clock="device")


# The compiler leaves threads and processes behind.
TRAINED_TWICE = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import otel_ddp
from otel_ddp import errors

errors.raise_failures = True

def trained(watched):
    torch._dynamo.reset()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    model = wrapped(model)
    if watched:
        otel_ddp.instrument(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(20):
        torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        model(torch.ones(32, 64, device="cuda")).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    return [p.detach().cpu() for p in model.parameters()]

"""
COMPARED = """
pairs = zip(trained(True), trained(False), strict=True)
print("same", all(torch.equal(a, b) for a, b in pairs), errors.failures)
"""


def test_a_compiled_model_that_captures_graphs_itself(node: Node) -> None:
    pytest.importorskip("triton")
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        pytest.skip("needs a C compiler")
    compiled = "def wrapped(model):\n    return torch.compile(model, mode='reduce-overhead')\n"

    said = node.run(TRAINED_TWICE + compiled + COMPARED)

    assert "same True {}" in said
    (journal,) = journals(node).values()
    assert journal.total(catalog.TRAINING_STEPS) == 20
    assert spent(journal, "forward") > 0
    assert spent(journal, "backward") > 0


def test_ddp_on_nccl_is_timed_by_the_device_and_trains_as_without_us(node: Node) -> None:
    # One rank: what there is to see is that the reducer's stream and ours get on.
    ddp = """
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
wrapped = DistributedDataParallel
"""

    said = node.run(f"{TRAINED_TWICE}{ddp}{COMPARED}dist.destroy_process_group()\n")

    assert "same True {}" in said
    (journal,) = journals(node).values()
    for name in ("forward", "backward", "comm_wait", "optimizer"):
        assert spent(journal, name) > 0, name


def test_neither_import_nor_init_makes_a_context(node: Node) -> None:
    """So a forked child may use the device, and the choice of devices is still open."""
    said = node.run("""
import os
import torch
import otel_ddp
print("import", torch.cuda.is_initialized())
otel_ddp.init()
otel_ddp.instrument(torch.nn.Linear(4, 1))
print("init", torch.cuda.is_initialized())
child = os.fork()
if child == 0:
    os._exit(int(torch.ones(1, device="cuda").item()) + 6)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
# The driver reads it at its first call, whoever makes that.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
try:
    torch.zeros(1, device="cuda")
except RuntimeError:
    print("hidden")
""")

    # Beside what otel_ddp says of the agent, and Python of forks.
    ours = [
        line for line in said.splitlines() if line.startswith(("import", "init", "child", "hid"))
    ]
    assert ours == ["import False", "init False", "child 7", "hidden"]


def test_a_model_on_a_gpu_is_found_by_its_uuid(place: Here) -> None:
    model = nn.Linear(4, 1).cuda()
    otel_ddp.instrument(model)
    model(torch.ones(2, 4).cuda()).sum().backward()

    (board,) = place.only().facts["boards"]
    assert board["index"] == torch.cuda.current_device()
    assert len(board["uuid"]) == 36
