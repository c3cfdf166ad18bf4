"""The page of parity: every capability is on it once, and every test that it names is there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "parity.md"

# How many capabilities each document has.
COUNTS = {"000": 19, "001": 13, "002": 19, "003": 15, "004": 23}
TRAPS = {"000": ["000-trap-1", "000-trap-2"]}
IDS = [
    each
    for document, count in COUNTS.items()
    for each in (*(f"{document}-{n}" for n in range(1, count + 1)), *TRAPS.get(document, []))
]
# How a cell says that no test holds all of it.
REASONS = ("Deliberately different: ", "Comes later: ")

_ROW = re.compile(r"^\| *(\d{3}-[\w-]+) *\|(.*)\|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]+\.py)((?:::\w+)+)`")


def faults(page: str) -> Iterator[str]:
    """What is wrong with such a page."""
    rows = _ROW.findall(page)
    ids = [each for each, _ in rows]
    if ids != IDS:
        yield f"not each id once and in order: {sorted(set(ids) ^ set(IDS)) or ids}"
    for id_, rest in rows:
        cells = [each.strip() for each in re.split(r"(?<!\\)\|", rest)]
        if len(cells) != 2 or not all(cells):
            yield f"{id_}: two cells are to be filled"
            continue
        tests = _TEST.findall(cells[1])
        if not tests and not cells[1].startswith(REASONS):
            yield f"{id_}: neither a test nor a reason"
        if any(cells[1].endswith(each.strip()) for each in REASONS):
            yield f"{id_}: a reason without words"
        if cells[1].count("tests/") != len(tests):
            yield f"{id_}: a test that is not written as `tests/file.py::test_name`"
        for path, names in tests:
            if names.removeprefix("::") not in named_in(path):
                yield f"{id_}: {path}{names} is not there"


@cache
def named_in(path: str) -> set[str]:
    """The tests of a file, which is read and not imported."""
    file = ROOT / path
    if not file.exists():
        return set()
    found = set()
    for node in ast.parse(file.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        found |= {prefix + each.name for each in inside if isinstance(each, ast.FunctionDef)}
    return {each for each in found if each.rpartition("::")[2].startswith("test_")}


def test_every_capability_is_there_once_with_a_test_that_exists_or_a_reason() -> None:
    assert list(faults(PAGE.read_text())) == []


HELD = "`tests/test_parity.py::test_a_page_that_breaks_a_rule_is_found`"
WHOLE = "".join(f"| {each} | what it is | {HELD} |\n" for each in IDS)
FIRST = f"| 000-1 | what it is | {HELD} |\n"


def test_a_page_that_keeps_the_rules_passes() -> None:
    inside = (
        "`tests/agent/reading/test_journal_feed.py::TestNodeNames"
        "::test_a_name_that_the_user_gave_wins`"
    )

    assert list(faults(WHOLE)) == []
    for held in (f"{HELD}, {inside}", "Comes later: logs", f"{HELD}. Comes later: logs"):
        assert list(faults(WHOLE.replace(FIRST, f"| 000-1 | what | {held} |\n"))) == []


@pytest.mark.parametrize(
    ("instead", "fault"),
    [
        ("", "not each id once"),
        (FIRST + FIRST, "not each id once"),
        (FIRST.replace("000-1 ", "000-20 "), "not each id once"),
        (f"| 000-1 |  | {HELD} |\n", "two cells"),
        ("| 000-1 | what it is | |\n", "two cells"),
        (f"| 000-1 | what it is | {HELD} | more |\n", "two cells"),
        ("| 000-1 | what it is | it works |\n", "neither a test nor a reason"),
        ("| 000-1 | what it is | Comes later: |\n", "a reason without words"),
        (FIRST.replace("::test_a_page", "::test_no_page"), "is not there"),
        (FIRST.replace("tests/test_parity", "tests/test_parities"), "is not there"),
        (FIRST.replace("test_a_page_that_breaks_a_rule_is_found", "faults"), "is not there"),
        (FIRST.replace("`", ""), "neither a test"),
        (FIRST.replace(" |\n", ", tests/run/test_run.py |\n"), "not written as"),
    ],
)
def test_a_page_that_breaks_a_rule_is_found(instead: str, fault: str) -> None:
    found = list(faults(WHOLE.replace(FIRST, instead)))

    assert any(fault in each for each in found)
