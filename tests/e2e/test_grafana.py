"""The boards in a real Grafana, looked at in a real browser; skipped where one is missing."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.dashboards.links import BOARDS, uid
from tools.dashboards.queries import FOLDER, panels
from tools.stack import grafana, loki
from tools.stack.build import Binaries
from tools.stack.server import free_port

from nvml_boards import standin_library
from stack.browser import Browser, browser
from stack.scenario import BASE, LOW, Scenario, scenario

# Where the tests run there may be no such thing; and no traces are stored.
MAY_BE_EMPTY = {"Swap", "InfiniBand and RoCE", "Standing still for want of", "Sampled steps"}
# The run that has most to show on each board.
SHOWN = {"Run": LOW.name, "Ranks": BASE.name}


@pytest.fixture(scope="module")
def binary() -> Path:
    found = grafana.found()
    if found is None:
        pytest.skip("no Grafana: put it on the PATH, or name its binary in GRAFANA")
    return found


@pytest.fixture(scope="module")
def log_store(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    built = loki.found() or pytest.skip("no Loki: put it on the PATH, or name its binary in LOKI")
    server, url = loki.server(built, tmp_path_factory.mktemp("loki"), free_port())
    with server:
        yield url


@pytest.fixture(scope="module")
def played(
    binary: Path, binaries: Binaries, log_store: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scenario]:
    folder = tmp_path_factory.mktemp("scenario")
    gpus = standin_library(tmp_path_factory)
    with scenario(binaries, folder, gpus, f"{log_store}/otlp/v1/logs") as here:
        here.play()
        here.rest()
        yield here


@pytest.fixture(scope="module")
def looking(
    binary: Path, played: Scenario, log_store: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Browser]:
    folder = tmp_path_factory.mktemp("grafana")
    stores = played.prometheus.url, log_store
    server, url = grafana.server(binary, folder, free_port(), *stores)
    with server, browser(url) as found:
        yield found


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures of the boards are kept."""
    if "OTEL_DDP_TEST_PICTURES" not in os.environ:
        return tmp_path_factory.mktemp("pictures")
    folder = Path(os.environ["OTEL_DDP_TEST_PICTURES"])
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def times(played: Scenario) -> dict[str, str]:
    return {"from": f"{played.start_s * 1000:.0f}", "to": f"{played.end_s * 1000:.0f}"}


def lines(title: str) -> int:
    """How high a board is with all its rows open."""
    ends: dict[int, int] = {}
    tops: dict[int, int] = {}
    for row, panel in panels(file(title)):
        place = panel["gridPos"]
        tops[row["id"]] = row["gridPos"]["y"]
        ends[row["id"]] = max(ends.get(row["id"], 0), place["y"] + place["h"])
    return sum(end - tops[row] for row, end in ends.items())


def file(title: str) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(
        (FOLDER / f"{uid(title).removeprefix('otel-ddp-')}.json").read_text()
    )
    return told


@pytest.mark.parametrize("title", BOARDS)
def test_every_panel_of_every_board_shows_something(
    title: str, looking: Browser, played: Scenario, pictures: Path
) -> None:
    asked = {"var_run": SHOWN[title]} if title in SHOWN else {}
    with looking.open(uid(title), lines(title), **times(played), **asked) as board:
        board.open_rows()
        seen = board.panels()
        board.keep(pictures / f"{uid(title)}.png")

    assert len(seen) == len(list(panels(file(title))))
    counted = [each for each in seen if each.title not in MAY_BE_EMPTY]
    assert [each.title for each in counted if each.failed] == []
    # Words of our own, such as "none", are an answer.
    assert [each.title for each in counted if each.empty and "No data" in each.text] == []
