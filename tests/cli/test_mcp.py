"""otel-ddp mcp without a client: what it lacks, and how long an answer may be."""

from __future__ import annotations

import json
import math
import signal
import sys

import pytest

from extras import needed
from node import PATIENCE_S, Node
from otel_ddp.cli import main
from otel_ddp.cli.programs.mcp import answering, shortened


def test_without_the_package_one_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As Python finds a module that is not there; another test may have imported some of it.
    for module in {"mcp", *(each for each in sys.modules if each.startswith("mcp."))}:
        monkeypatch.setitem(sys.modules, module, None)

    assert main(["mcp"]) == 2

    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "",
        "otel-ddp mcp needs mcp 2.0 or newer: pip install 'otel-ddp[mcp]'.\n",
    )


def test_half_a_character_and_nan_of_a_training_stop_no_answer() -> None:
    needed("mcp", "dev")

    found = answering(lambda: {"name": "\udcff", "loss": math.nan})()

    assert found.structured_content == {"name": "?", "loss": None, "left_out": {}}


def test_an_answer_has_100_entries_of_a_list_and_counts_the_others() -> None:
    inner = [{"b": [*range(101)]}, {"b": [*range(102)]}]
    document = {"a": [*range(130)], "in": inner, "text": "x" * 130, "left_out": {"d": 7}}

    assert shortened(document) == {
        **document,
        "a": [*range(100)],
        "in": [{"b": [*range(100)]}] * 2,
        "left_out": {"d": 7, "a": 30, "in.b": 3},
    }


def test_ctrl_c_ends_it_though_its_client_is_silent() -> None:
    needed("mcp", "dev")
    hello = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    with Node() as node:
        server = node.start(sys.executable, "-m", "otel_ddp", "mcp")
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(f"{json.dumps(hello)}\n")
        server.stdin.flush()
        # It answers, and waits for the next line.
        assert json.loads(server.stdout.readline())["id"] == 1

        server.send_signal(signal.SIGINT)

        assert server.wait(PATIENCE_S) == -signal.SIGINT
