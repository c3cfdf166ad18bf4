"""What stands around the code agrees with it: workflow, issue forms, recipes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import commands
from extras import needed_command
from otel_ddp.torch.models import OLDEST

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()
PYTHONS = re.findall(r"Python :: (3\.\d+)", PROJECT)
# A source distribution does not have it.
in_a_checkout = pytest.mark.skipif(not (ROOT / ".github").exists(), reason="no checkout")


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@in_a_checkout
def test_the_workflow_tests_each_python_that_the_package_names_and_both_ends_of_torch() -> None:
    matrix = load(ROOT / ".github" / "workflows" / "ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    oldest = ".".join(map(str, OLDEST))

    assert matrix["python"] == PYTHONS
    assert f'requires-python = ">={matrix["python"][0]}"' in PROJECT
    assert matrix["torch"] == [oldest, "newest"]
    assert f'torch = ["torch>={oldest}", ' in PROJECT


@in_a_checkout
def test_the_workflows_have_no_flaw_that_their_auditor_knows() -> None:
    zizmor = needed_command("zizmor", "dev"), "--offline", "--persona=pedantic", "--quiet"
    audited = commands.run(*zizmor, ROOT / ".github" / "workflows")

    assert audited.returncode == 0, audited.stdout + audited.stderr


@in_a_checkout
def test_nothing_is_published_that_was_not_installed_on_each_python_of_the_package() -> None:
    jobs = load(ROOT / ".github" / "workflows" / "release.yml")["jobs"]

    assert {*PYTHONS} <= {*jobs["try"]["strategy"]["matrix"]["python"]}
    assert "try" in jobs["publish"]["needs"]


def test_each_extra_that_is_installed_is_one_of_the_package() -> None:
    extras = PROJECT.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    # pip only warns of one that it does not know.
    named = ",".join(re.findall(r"\.with-([\w,]+)", (ROOT / "Makefile").read_text())).split(",")

    assert {"torch", "schemas"} <= set(named)
    assert set(named) <= set(re.findall(r"^(\w+) = \[", extras, re.M))


def test_each_program_of_others_can_be_read_and_has_its_row() -> None:
    # The list is TOML, which Python reads since 3.11.
    pytest.importorskip("tomllib")
    from tools.programs.program import listed

    rows = (ROOT / "docs" / "internals" / "programs.md").read_text().splitlines()
    shown = [line.split(" | ")[0].removeprefix("| ") for line in rows if line.startswith("| ")]

    assert [each.title for each in listed() if shown.count(each.title) != 1] == []
