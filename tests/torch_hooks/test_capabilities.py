"""Whether arrivals at collectives can be told, and what is missing where they cannot."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from otel_ddp.torch import capabilities


@pytest.fixture
def group() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_a_recorder_with_something_in_it_is_enough(group: None) -> None:
    torch.distributed.all_reduce(torch.ones(1))

    assert capabilities._arrivals() == ""


@pytest.mark.parametrize("said", [None, b"{}", b'{"pg_status": {}}'])
def test_a_recorder_that_is_missing_off_or_empty_is_told_with_the_way_to_it(
    group: None, monkeypatch: pytest.MonkeyPatch, said: bytes | None
) -> None:
    c10d = torch._C._distributed_c10d
    if said is None:
        monkeypatch.delattr(c10d, "_dump_fr_trace_json")
    else:
        monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda **_: said)

    assert capabilities._arrivals() == "no_recorder"
    (sentence,) = capabilities.sentences({"arrivals": "no_recorder"})
    assert "TORCH_FR_BUFFER_SIZE" in sentence


def test_hosts_that_go_on_while_their_devices_wait_are_not_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(capabilities, "backend", lambda: "nccl")

    assert capabilities._arrivals() == "host_ahead"
