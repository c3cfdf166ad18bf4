"""The contract and the page of parity: each of their sentences names a test that there is."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONTRACT = (ROOT / "docs" / "internals" / "contract.md").read_text()
PARITY = (ROOT / "docs" / "internals" / "parity.md").read_text()
TEST = re.compile(r"`(tests/[\w/]+\.py)::(?:\w+::)?(\w+)`")


@cache
def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}


@pytest.mark.parametrize("page", [CONTRACT, PARITY], ids=["contract", "parity"])
def test_each_test_that_a_page_names_is_there(page: str) -> None:
    named = TEST.findall(page)

    assert len(named) > 40
    assert page.count("`tests/") == len(named)
    missing = [f"{path}::{name}" for path, name in named if name not in names_in(ROOT / path)]
    assert missing == []


def test_each_promise_names_a_test() -> None:
    # Two tables in between say what is lost, and what becomes of an answer.
    promises, _, rest = CONTRACT.partition("## What is lost when")
    _, _, after = rest.partition("## The agent")
    listed = re.findall(r"^- .+$", promises + after, re.MULTILINE)

    assert len(listed) > 40
    assert [line for line in listed if not TEST.search(line)] == []


def test_each_capability_is_there_once_with_a_test_or_a_reason() -> None:
    rows = re.findall(r"^- (\d{3})-(\S+): [^:]+: (.+)$", PARITY, re.MULTILINE)
    numbers = {"000": 19, "001": 13, "002": 19, "003": 15, "004": 23}
    expected = {(each, str(n + 1)) for each, count in numbers.items() for n in range(count)}

    ids = [(document, number) for document, number, _ in rows]
    assert sorted(ids) == sorted(expected | {("000", "trap-1"), ("000", "trap-2")})
    for document, number, held in rows:
        reason = re.match(r"(Deliberately different|Comes later): \w", held)
        assert TEST.search(held) or reason, f"{document}-{number}"
