"""otel-ddp mcp without a client: what it lacks, and how long an answer may be."""

from __future__ import annotations

import sys

import pytest

from otel_ddp.cli import main
from otel_ddp.cli.programs.mcp import shortened


def test_without_the_package_one_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # As Python finds a module that is not there.
    monkeypatch.setitem(sys.modules, "mcp", None)

    assert main(["mcp"]) == 2

    said = capsys.readouterr()
    assert (said.out, said.err) == (
        "",
        "otel-ddp mcp needs the package mcp: pip install 'otel-ddp[mcp]'.\n",
    )


def test_an_answer_has_100_entries_of_a_list_and_counts_the_others() -> None:
    document = {"a": [*range(130)], "b": [*range(100)], "c": "x" * 130, "left_out": {"d": 7}}

    assert shortened(document) == {
        **document,
        "a": [*range(100)],
        "left_out": {"d": 7, "a": 30},
    }
