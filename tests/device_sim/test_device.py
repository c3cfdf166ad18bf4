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
