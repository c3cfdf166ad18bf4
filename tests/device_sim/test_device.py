"""The asynchronous device itself: that it is one, and computes what the CPU does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from node import Node, finished

pytestmark = [pytest.mark.timed, pytest.mark.usefixtures("device_sim")]

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def seen() -> dict[str, Any]:
    with Node() as node:
        # It ends although a kernel never does.
        finished(node.warm(str(HERE / "behaves.py"), str(node.root)))
        return dict(json.loads((node.root / "seen").read_text()))


def test_a_launch_returns_while_the_device_is_busy(seen: dict[str, Any]) -> None:
    assert seen["runs_behind"]["launched_s"] < 0.3
    assert not seen["runs_behind"]["passed"]
    assert seen["runs_behind"]["sum"] == 8


def test_the_host_waits_where_the_launch_queue_is_full(seen: dict[str, Any]) -> None:
    assert seen["full_queue"]["most_s"] < 0.2 < seen["full_queue"]["one_more_s"]


def test_streams_run_beside_each_other_and_wait_for_events(seen: dict[str, Any]) -> None:
    assert 0.3 <= seen["several_streams"]["both_s"] < 0.5
    assert 100 <= seen["several_streams"]["after_first_ms"] < 200


def test_events_tell_how_long_a_kernel_took(seen: dict[str, Any]) -> None:
    assert 50 <= seen["timed"] < 100


def test_what_the_host_waits_for_is_counted_by_its_reason(seen: dict[str, Any]) -> None:
    assert seen["reasons"] == {
        "launch": {},
        "item": {"item": 1},
        "to the device": {},
        "page-locked": {},
        "pageable": {"copy": 1},
        "sizes by data": {"fallback": 1, "aten::nonzero": 1},
        "stream": {"stream": 1},
    }


def test_memory_is_counted_until_the_last_kernel_on_it_is_done(seen: dict[str, Any]) -> None:
    assert seen["memory"] == [4000, 4000, 0]


def test_a_copy_reads_page_locked_memory_when_the_device_comes_to_it(seen: dict[str, Any]) -> None:
    assert seen["overtaken"] == [2.0, 1.0]


def test_two_devices_of_a_process_work_beside_each_other(seen: dict[str, Any]) -> None:
    assert seen["two_devices"]["alone_s"] < 0.2
    assert seen["two_devices"]["copied"] == [4.0, 4.0]
    assert seen["two_devices"]["bytes"][1] > 0


def test_what_is_captured_runs_with_each_replay(seen: dict[str, Any]) -> None:
    assert seen["captured"]["values"] == [0.0, 1.0, 2.0]
    assert seen["captured"]["event"] == "an event is recorded while a graph is captured"


def test_a_kernel_that_fails_is_told_where_the_host_waits(seen: dict[str, Any]) -> None:
    assert seen["failed"] == "a kernel has failed: index out of range in self"


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """What two ranks say of the same trainings on the CPU and on the device."""
    with Node() as node:
        finished(node.torchrun(2, str(HERE / "same_losses.py"), str(node.root)))
        return [json.loads((node.root / rank).read_text()) for rank in ("0", "1")]


@pytest.mark.parametrize("spread", ["in_ddp", "sharded"])
def test_ranks_train_to_the_same_bits_as_on_the_cpu_and_no_host_waits(
    ranks: list[dict[str, Any]], spread: str
) -> None:
    said = [each[spread] for each in ranks]

    for each in said:
        assert len(each["device"]) == 200
        assert each["device"] == each["cpu"]
        assert each["waited"] == {}
    assert said[0]["device"] != said[1]["device"]
