"""otel-ddp page: the port that was asked for, or a sentence."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from otel_ddp.cli import main


def test_a_port_that_is_taken_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        assert main(["page", "--port", str(port), str(tmp_path)]) == 1

    assert f"Port {port} cannot be used: another program has it" in capsys.readouterr().err
