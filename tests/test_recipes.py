"""The recipes of CONTRIBUTING.md lead to files that there are, and every list has its rows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import _STRANGE
from otel_ddp.identity import launchers
from otel_ddp.integrations.launch.startup.sitecustomize import NAMES
from otel_ddp.vocabulary.words import MEASURED_PHASES, VERDICTS
from test_rooms import HOMES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "otel_ddp"
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
_ITEM = re.compile(r"^(?:-|\d+\.) (.+(?:\n  +.+)*)", re.MULTILINE)
RECIPES = (
    "Add a number of a GPU",
    *("Add a fact for the judge", "Add a panel of the page"),
    *("Add a launcher", "Add a phase", "Add a framework", "Add a verdict", "Add a setting"),
)


def files(recipe: str) -> Iterator[tuple[str, str]]:
    """Each file of a recipe's list, and what it gets."""
    section = PAGE.partition(f"## {recipe}\n")[2].partition("\n## ")[0]
    for item in _ITEM.findall(section):
        name, _, what = item.partition("`: ")
        yield name.removeprefix("`"), what


def text_of(page: str) -> str:
    return (ROOT / "docs" / page).read_text()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_touches_four_files_at_most_and_names_what_is_in_them(recipe: str) -> None:
    rows = list(files(recipe))

    assert 1 <= len(rows) <= 4
    for name, what in rows:
        # A new file is made of what another one has.
        other = re.findall(r"`(src/[\w/]+\.(?:py|js))`", what) if "<" in name else [name]
        text = "".join((ROOT / each).read_text() for each in other)
        words = set(re.findall(r"`([A-Za-z_]\w*)`", what)) - {"run"}
        assert words, name
        assert [each for each in sorted(words) if each not in text] == []


@pytest.mark.parametrize(
    ("walk", "most"),
    [
        *[("A value", 15), ("A step", 15), ("A run on several nodes", 15), ("A hang", 15)],
        ("The end of a process", 4),
    ],
)
def test_a_walk_passes_files_that_there_are_and_few_of_them(walk: str, most: int) -> None:
    text = text_of("how-it-works.md").partition(f"**{walk}**")[2]
    items = _ITEM.findall(text.partition("\n**")[0].partition("\n## ")[0])

    passed: list[Path] = []
    for name in re.findall(r"`([\w/]+\.py)`", "\n".join(items)):
        passed.append(Path(name) if "/" in name else passed[-1].parent / name)
    assert 4 <= len(passed) <= most
    assert [str(each) for each in passed if not (PACKAGE / each).is_file()] == []


def test_every_launcher_has_its_case_and_its_variables_are_kept_from_tests() -> None:
    known = [each for each in vars(launchers).values() if isinstance(each, launchers._Variables)]
    cases = (ROOT / "tests" / "identity" / "test_identity.py").read_text()

    assert len(known) == 5
    for each in known:
        assert f'("{each.launcher}", ' in cases
        assert each.global_rank.startswith(_STRANGE)


def test_every_phase_and_every_verdict_has_its_words_for_people() -> None:
    training, diagnosis = text_of("training.md"), text_of("diagnosis.md")

    assert [each for each in MEASURED_PHASES if f"`{each}`" not in training] == []
    assert [each for each in VERDICTS if not re.search(rf"^- \[?{each}\b", diagnosis, re.M)] == []


def test_every_framework_has_its_home_its_heading_and_what_its_import_calls() -> None:
    folder = PACKAGE / "integrations"
    # Trackers are no frameworks.
    known = {each.stem for each in folder.glob("*.py")} - {"__init__", "trackers"}
    page = text_of("frameworks.md")

    assert [each for each in known if f"otel_ddp.integrations.{each}" not in page] == []
    # Ray is found by its name: while Python is about to end its import, it cannot be imported.
    assert {Path(HOMES[each]).stem for each in known - {"ray"}} == known - {"ray"}
    for call in NAMES.values():
        module, _, function = call.rpartition(".")
        home = folder / "launch" / "__init__.py" if module == "launch" else folder / f"{module}.py"
        tree = ast.parse(home.read_text())
        assert function in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}


def test_every_name_that_is_said_to_be_of_a_file_is_in_it() -> None:
    said = re.findall(r"((?:`\w+`(?:, | or | and )?)+) (?:of|in) `([\w/]+\.py)`", PAGE)

    assert len(said) >= 3
    for names, file in said:
        words = set(re.findall(r"\w+", (ROOT / file).read_text()))
        assert set(re.findall(r"\w+", names)) <= words | {"or", "and"}, file
