"""Rules are what the linter of Prometheus' users asks for, and each of them is used."""

from __future__ import annotations

import re

import pytest
from tools.dashboards.queries import FOLDER

import go_modules
from deploy.files import DEPLOY, ROOT

PROMETHEUS = DEPLOY / "prometheus"
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


def test_each_recording_rule_is_used_by_a_board_an_alert_a_rule_or_a_page() -> None:
    files = [*PROMETHEUS.glob("[ar][lu]*s/*.yml"), *FOLDER.glob("*.json")]
    text = "\n".join(path.read_text() for path in (*files, *(ROOT / "docs").rglob("*.md")))
    recorded = re.findall(r"record: (\S+)", text)

    used = re.findall(r"(?<!record: )\b[a-z_]+:[a-z_]+:\w+", text)

    assert recorded
    assert set(recorded) - set(used) == set()
