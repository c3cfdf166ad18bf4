"""What stands around the code agrees with it: workflow, issue forms, recipes."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import go_modules
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
    assert f'torch = ["torch>={oldest}"]' in PROJECT


@in_a_checkout
def test_the_workflow_calls_what_is_there() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()

    named = re.findall(r"\b(?:tools|tests)/[\w./]*\w", text)
    assert "tests/torch" in named
    assert [each for each in named if not (ROOT / each).exists()] == []
    assert (ROOT / ".ci" / "run").is_file()
    assert re.search(r"^dist:", (ROOT / "Makefile").read_text(), re.M)


@in_a_checkout
def test_the_workflows_have_no_flaw_that_their_auditor_knows() -> None:
    command = [needed_command("zizmor", "dev"), "--offline", "--persona=pedantic", "--quiet"]
    command.append(str(ROOT / ".github" / "workflows"))
    audited = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert audited.returncode == 0, audited.stdout + audited.stderr


@in_a_checkout
@pytest.mark.stress
def test_the_workflows_are_written_as_they_must_be() -> None:
    linter = "github.com/rhysd/actionlint@v1.7.12/cmd/actionlint"
    files = sorted((ROOT / ".github" / "workflows").glob("*.yml"))

    assert go_modules.run(linter, *files) == (0, "")


@in_a_checkout
def test_a_release_is_built_by_the_command_that_people_have_and_keeps_no_secret() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()

    assert "run: make dist" in text
    assert "id-token: write" in text
    assert "secrets." not in text


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


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()


def test_every_path_that_the_recipes_name_is_there() -> None:
    folders = "src|tests|tools|docs|deploy|examples|bench"
    named = re.findall(rf"(?<![\w./])((?:{folders})/[\w./-]*\w)", CONTRIBUTING)
    boards = re.findall(r"`(\w+\.py)`", CONTRIBUTING)

    assert len(named) > 20
    assert [each for each in named if not (ROOT / each).exists()] == []
    assert [each for each in boards if not (ROOT / "tools" / "dashboards" / each).exists()] == []


@pytest.mark.parametrize(
    ("name", "file"),
    [
        (
            "test_every_metric_of_the_catalogue_is_on_some_board",
            "tests/deploy/test_dashboards_lint.py",
        ),
        ("count", "src/otel_ddp/recording/totals.py"),
        ("stamp", "src/otel_ddp/recording/totals.py"),
        ("observe", "src/otel_ddp/recording/totals.py"),
        ("Measurement", "src/otel_ddp/agent/node/source.py"),
        ("KernelFiles", "src/otel_ddp/agent/node/source.py"),
        ("Sampler", "src/otel_ddp/agent/node/source.py"),
        ("SOURCES", "src/otel_ddp/settings.py"),
        ("PLACES", "tests/identity/test_identity.py"),
        ("_STRANGE", "tests/conftest.py"),
        ("_Variables", "src/otel_ddp/identity/launchers.py"),
        ("_candidates", "src/otel_ddp/identity/launchers.py"),
        ("find", "src/otel_ddp/identity/run_names.py"),
        ("ROWS", "src/otel_ddp/agent/node/gpu/nvml_table.py"),
        ("Driver", "src/otel_ddp/agent/node/gpu/driver.py"),
        ("known", "src/otel_ddp/agent/node/gpu/drivers.py"),
        ("HOMES", "tests/test_rooms.py"),
        ("_part", "src/otel_ddp/agent/node/host.py"),
        ("Text", "tools/dashboards/panels.py"),
    ],
)
def test_every_name_that_the_recipes_use_is_defined_where_they_say(name: str, file: str) -> None:
    assert f"`{name}`" in CONTRIBUTING
    assert re.search(rf"^(?:    )?(?:def |class )?{name}\b", (ROOT / file).read_text(), re.M)


def test_each_program_of_others_can_be_read_and_has_its_row() -> None:
    # The list is TOML, which Python reads since 3.11.
    pytest.importorskip("tomllib")
    from tools.programs.program import listed

    rows = (ROOT / "docs" / "programs.md").read_text().splitlines()
    shown = [line.split(" | ")[0].removeprefix("| ") for line in rows if line.startswith("| ")]

    assert [each.title for each in listed() if shown.count(each.title) != 2] == []
