"""otel-ddp open without an agent: it serves the kept runs, and goes to the one that is meant."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from histories import write_history
from otel_ddp.cli import main


@contextmanager
def opened(*words: str, **env: str) -> Iterator[list[str]]:
    """What it prints with the address, and what its browser is sent to; Ctrl-C ends it."""
    with subprocess.Popen(
        # Where tests run in the background it is ignored, and that is inherited.
        ["env", "--default-signal=INT", sys.executable, "-m", "otel_ddp", "open", *words],
        env={**os.environ, "BROWSER": "echo opened %s", **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield [process.stdout.readline().strip() for _ in range(2)]
        finally:
            process.send_signal(signal.SIGINT)
            status = process.wait(60)
    assert status == 128 + signal.SIGINT


def answered(address: str, path: str) -> Any:
    base, _, query = address.partition("/run/")
    run, _, group = query.partition("?")
    with urllib.request.urlopen(f"{base}/api/{path}?run={run}&{group}", timeout=60) as answer:
        return json.load(answer)


def test_a_run_of_another_node_is_opened_by_its_name_and_asks_for_no_token(tmp_path: Path) -> None:
    now_ns = time.time_ns()
    for run, group in (("r", "g"), ("r", "h"), ("newer", "g")):
        write_history(tmp_path, run, group=group, node="n7", ranks=1, steps=5, began_ns=now_ns)
    (tmp_path / "token").write_text("secret")
    kept = {
        "OTEL_DDP_DIR": str(tmp_path / "none"),
        "OTEL_DDP_HISTORY_DIR": str(tmp_path),
        "OTEL_DDP_SCRAPE_TOKEN_FILE": str(tmp_path / "token"),
    }

    with opened("g/r", **kept) as (address, browser):
        head = answered(address, "run")
    with opened(str(tmp_path), **(kept | {"OTEL_DDP_HISTORY_DIR": ""})) as (of_folder, _):
        listed = answered(of_folder.rstrip("/"), "runs")

    assert address.endswith("/run/r?group=g")
    assert browser == f"opened {address}"
    assert (head["group"], head["nodes"]) == ("g", ["n7"])
    assert {(each["group"], each["run"]) for each in listed["runs"]} == {
        ("g", "r"),
        ("h", "r"),
        ("g", "newer"),
    }


def test_a_port_that_is_taken_gives_the_next_one(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with opened(str(tmp_path), OTEL_EXPORTER_PROMETHEUS_PORT=str(port)) as (address, _):
            served = int(address.rstrip("/").rpartition(":")[2])

    assert port < served <= port + 20


def test_a_run_that_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["OTEL_DDP_HISTORY_DIR"] = str(tmp_path)
    write_history(tmp_path, "r", group="g", ranks=1, steps=5)

    assert main(["open", "other"]) == 2

    assert "it has r." in capsys.readouterr().err
