"""Boards and rules are what the linters of Grafana's and Prometheus' users ask for."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import pytest
import yaml
from tools.dashboards.queries import FOLDER, panels

import go_modules
from deploy.files import DEPLOY, ROOT, documents, tool

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
    linted = subprocess.run(command, capture_output=True, text=True, timeout=60)

    assert linted.returncode == 0, linted.stdout + linted.stderr


def test_the_linters_are_told_to_overlook_only_what_is_there() -> None:
    boards = [json.loads(path.read_text()) for path in FOLDER.glob("*.json")]
    shown = {(board["title"], panel["title"]) for board in boards for _, panel in panels(board)}
    excluded = yaml.safe_load(LINT.read_text())["exclusions"].values()
    entries = [entry for each in excluded for entry in each.get("entries", ())]
    rules = {
        rule.get("record") or rule["alert"]
        for path in PROMETHEUS.glob("[ar][lu]*s/*.yml")
        for group in documents(path)[0]["groups"]
        for rule in group["rules"]
    }
    patterns = re.findall(r'name = "(.*)"', PINT.read_text())

    assert all(each["reason"] for each in excluded)
    for entry in entries:
        assert entry["dashboard"] in {board for board, _ in shown}
        assert "panel" not in entry or tuple(entry.values()) in shown
    assert {name for pattern in patterns for name in pattern.split("|")} <= rules


def test_each_recording_rule_is_used_by_a_board_an_alert_a_rule_or_a_page() -> None:
    files = [*PROMETHEUS.glob("[ar][lu]*s/*.yml"), *FOLDER.glob("*.json")]
    text = "\n".join(path.read_text() for path in (*files, *(ROOT / "docs").rglob("*.md")))
    recorded = re.findall(r"record: (\S+)", text)

    used = re.findall(r"(?<!record: )\b[a-z_]+:[a-z_]+:\w+", text)

    assert recorded
    assert set(recorded) - set(used) == set()
