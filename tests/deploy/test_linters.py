"""Boards and rules are what the linters of Grafana's and Prometheus' users ask for."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import pytest
from tools.dashboards.queries import FOLDER

import go_modules
from deploy.files import DEPLOY, ROOT, tool

PROMETHEUS = DEPLOY / "prometheus"
LINT = ROOT / "tools" / "dashboards" / "lint.yaml"
PINT = PROMETHEUS / "tests" / "pint.hcl"


@pytest.mark.stress
def test_the_rules_are_as_pint_wants_them() -> None:
    rules = PROMETHEUS / "rules", PROMETHEUS / "alerts"

    status, told = go_modules.run(
        "github.com/cloudflare/pint@v0.87.0/cmd/pint",
        *("--offline", "--no-color", "--config", PINT),
        *("lint", "--min-severity=info", "--fail-on=info", *rules),
    )

    assert status == 0, told


@pytest.mark.stress
@pytest.mark.parametrize("board", sorted(FOLDER.glob("*.json")), ids=lambda path: str(path.stem))
def test_the_boards_are_as_dashboard_linter_wants_them(board: Any) -> None:
    # Its module cannot be built from the registry alone.
    linter = tool("dashboard-linter") or pytest.skip("needs dashboard-linter on the PATH")
    command = [linter, "lint", "--strict", "--config", LINT, board]
    linted = subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_each_recording_rule_is_used_by_a_board_an_alert_a_rule_or_a_page() -> None:
    files = [*PROMETHEUS.glob("[ar][lu]*s/*.yml"), *FOLDER.glob("*.json")]
    text = "\n".join(path.read_text() for path in (*files, *(ROOT / "docs").rglob("*.md")))
    recorded = re.findall(r"record: (\S+)", text)

    used = re.findall(r"(?<!record: )\b[a-z_]+:[a-z_]+:\w+", text)

    assert recorded
    assert set(recorded) - set(used) == set()
