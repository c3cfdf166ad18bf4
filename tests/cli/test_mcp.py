"""otel-ddp mcp without a client: what it lacks, and how long an answer may be."""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from pathlib import Path

import pytest

from extras import needed
from histories import write_history
from node import PATIENCE_S, Node
from otel_ddp.cli import main
from otel_ddp.cli.mcp import Questions, answering, shortened


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


@pytest.mark.parametrize("path", ["there.sqlite", "folder", "missing"])
def test_no_question_tells_whether_a_path_exists(tmp_path: Path, path: str) -> None:
    needed("mcp", "dev")
    from mcp.server.mcpserver.exceptions import ToolError

    write_history(tmp_path / "folder", "elsewhere", steps=20)
    (tmp_path / "there.sqlite").write_bytes(next((tmp_path / "folder").iterdir()).read_bytes())
    os.environ["OTEL_DDP_HISTORY_DIR"] = str(tmp_path / "kept")
    write_history(tmp_path / "kept", "a", steps=20)
    ask, name = Questions(""), str(tmp_path / path)

    for question in (ask.run, ask.curves, ask.verdicts, ask.goodput):
        with pytest.raises(ToolError, match=r"is no run: .* it has a\."):
            answering(question)(run=name)
    with pytest.raises(ToolError, match=r"is no run: .* it has a\."):
        answering(ask.compare)(a="a", b=f"a,{name}")


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
