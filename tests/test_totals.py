"""The totals count what a maintainer reads, and the check holds them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tools import totals

PYTHON = '''\
"""Adds.

More about it.
"""

# A comment.


def add(first, second):
    """One line."""
    text = """two
lines"""
    return first + second, text  # with a comment
'''
SCRIPT = """\
// A comment.
import { a } from "./a.js";

/* A comment
   of two lines. */
const address = "http://localhost"; // the rest of a line
"""
RULES = """\
groups:
  - name: one
    rules:
      - record: a:b:c
        expr: |
          sum by (run) (
            up

          )
      - alert: Down
        expr: up == 0
"""


def test_comments_blank_lines_and_docstrings_are_no_code() -> None:
    assert totals.python_lines(PYTHON) == 4
    assert totals.script_lines(SCRIPT) == 2
    assert totals.promql_lines(RULES) == 4


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {
        "src/otel_ddp/sums.py": PYTHON,
        "src/otel_ddp/sums_pb2.py": PYTHON,
        "src/otel_ddp/history/page/static/run.js": SCRIPT,
        "deploy/prometheus/alerts/run.yml": RULES,
        "docs/index.md": "# Three words\n",
        "tools/totals.json": "{}",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(sys, "argv", ["totals", "--write"])
    assert totals.main(tmp_path) == 0
    monkeypatch.setattr(sys, "argv", ["totals"])
    return tmp_path


def test_the_file_holds_each_total_and_no_generated_code(checkout: Path) -> None:
    assert json.loads((checkout / totals.FILE).read_text()) == {
        "code lines of src": 4,
        "code lines of tests": 0,
        "code lines of tools": 0,
        "code lines of JavaScript and CSS": 2,
        "lines of PromQL": 4,
        "words of docs": 3,
    }


def test_a_total_above_the_file_fails_and_the_message_says_how_to_raise_it(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkout / "docs" / "index.md").write_text("# Now four words\n")

    assert totals.main(checkout) == 1
    said = capsys.readouterr().err
    assert "words of docs: 4, tools/totals.json has 3" in said
    assert "python -m tools.totals --write" in said
