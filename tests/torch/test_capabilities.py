"""What is reported as not measured: its page in the docs, and when arrivals are known."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

import otel_ddp
from conftest import Here
from otel_ddp.torch.readings import capabilities

TIMED_ON_ONE = "TORCH_NCCL_ENABLE_TIMING", "CUDA_DEVICE_MAX_CONNECTIONS"
PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_page_tells_of_every_reason_what_to_do() -> None:
    table = PAGE.read_text().partition("| reason |")[2].partition("\n\n")[0]
    firsts = "".join(row.split("|")[1] for row in table.splitlines()[2:])

    assert sorted(re.findall("`(.+?)`", firsts)) == sorted(filter(None, capabilities.REASONS))


@pytest.fixture
def group() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("backend", "word"), [("gloo", None), ("cpu:gloo,cuda:nccl", "not_timed")])
def test_arrivals_are_reported_under_nccl_and_after_the_first_collective(
    group: None, place: Here, monkeypatch: pytest.MonkeyPatch, backend: str, word: str | None
) -> None:
    monkeypatch.setattr(capabilities, "backend", lambda: backend)
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = "1"
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    otel_ddp.instrument(model)

    def said_after(steps: int) -> str | None:
        for _ in range(steps):
            model(torch.ones(8, 4)).sum().backward()
            optimizer.step()
        capability = place.only().facts["capability"]
        assert capability["comm_wait"] == "no_ddp"
        return capability.get("arrivals")

    # More than a loop takes to show what it is made of.
    assert said_after(30) is None
    torch.distributed.all_reduce(torch.ones(1))
    assert said_after(1) == word


@pytest.mark.parametrize(
    ("timing", "known", "word"),
    [
        (None, b'{"pg_status": {"0": {}}}', "not_timed"),
        ("0", b'{"pg_status": {"0": {}}}', "not_timed"),
        ("1", b'{"pg_status": {"0": {}}}', ""),
        ("TRUE", b'{"pg_status": {"0": {}}}', ""),
        ("1", b"{}", "no_recorder"),
    ],
)
def test_where_devices_wait_collectives_have_to_be_timed_and_recorded(
    monkeypatch: pytest.MonkeyPatch, timing: str | None, known: bytes, word: str
) -> None:
    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(c10d, "_dump_nccl_trace_json", lambda **_: known, raising=False)
    if timing is not None:
        monkeypatch.setenv("TORCH_NCCL_ENABLE_TIMING", timing)

    assert capabilities._arrivals() == word


def test_where_replica_groups_of_torchft_wait_is_not_known(place: Here) -> None:
    os.environ.update(
        REPLICA_GROUP_ID="1", NUM_REPLICA_GROUPS="2", TORCHFT_LIGHTHOUSE="http://localhost:29510"
    )
    # torchft's own DDP is one, and waits in a hook within backward.
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    otel_ddp.instrument(model)

    for _ in range(30):
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()

    assert place.only().facts["capability"]["comm_wait"] == "replica_groups"


@pytest.mark.parametrize(
    ("timing", "connections", "word"),
    [("1", "1", "timed"), ("1", "8", None), ("1", None, None), (None, "1", None), ("0", "1", None)],
)
def test_collectives_that_are_timed_on_one_connection_do_not_overlap(
    place: Here,
    monkeypatch: pytest.MonkeyPatch,
    timing: str | None,
    connections: str | None,
    word: str | None,
) -> None:
    monkeypatch.setattr(capabilities, "backend", lambda: "nccl")
    for name, value in zip(TIMED_ON_ONE, (timing, connections), strict=True):
        if value is not None:
            monkeypatch.setenv(name, value)
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    otel_ddp.instrument(model)

    for _ in range(30):
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()

    assert place.only().facts["capability"].get("overlap") == word


@pytest.mark.parametrize(("rank", "said"), [(0, 1), (2, 0)])
def test_of_all_nodes_one_rank_says_what_is_not_measured(
    place: Here, caplog: pytest.LogCaptureFixture, rank: int, said: int
) -> None:
    where = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    os.environ.update(where)
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    otel_ddp.instrument(model)

    for _ in range(30):
        model(torch.ones(8, 4)).sum().backward()
        optimizer.step()

    assert caplog.text.count("Not measured in this run") == said
