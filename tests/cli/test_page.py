"""otel-ddp page: the port that was asked for, or a sentence; and what it is told of prices."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from histories import S, two_attempts, write_history
from otel_ddp.cli import main


def test_a_port_that_is_taken_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        assert main(["page", "--port", str(port), str(tmp_path)]) == 1

    assert f"Port {port} cannot be used: another program has it" in capsys.readouterr().err


def test_it_tells_what_time_has_cost_and_refuses_a_price_that_means_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_history(tmp_path, "a", steps=20, about=two_attempts(S))
    monkeypatch.setenv("OTEL_DDP_GPU_HOUR_PRICE", "EUR 360")
    refused = main(["page", str(tmp_path)])
    monkeypatch.setenv("OTEL_DDP_GPU_HOUR_PRICE", "360 EUR")
    command = [sys.executable, "-m", "otel_ddp", "page", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        with urllib.request.urlopen(f"{address}api/run?run=a", timeout=300) as answer:
            told = json.load(answer)["time"]
        process.kill()

    assert refused == 2
    assert "OTEL_DDP_GPU_HOUR_PRICE must be a number and a currency" in capsys.readouterr().err
    assert (told["currency"], told["cost"]) == ("EUR", pytest.approx(10.0))
