"""The contract: each of its sentences names a test that there is."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONTRACT = ROOT / "docs" / "contract.md"
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}


def test_each_test_that_the_contract_names_is_there() -> None:
    named = TEST.findall(CONTRACT.read_text())

    assert len(named) > 40
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(ROOT / path)]
    assert missing == []


def test_each_promise_names_a_test() -> None:
    # Two tables in between say what is lost, and what becomes of an answer.
    promises, _, rest = CONTRACT.read_text().partition("## What is lost when")
    _, _, after = rest.partition("## The agent")
    for line in (promises + after).splitlines():
        if line.startswith("| ") and not line.startswith(("| promise", "| what |", "| fault")):
            assert TEST.search(line), line
