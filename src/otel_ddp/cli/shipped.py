"""Finds what is deployed beside the agent: the files of this version, its boards and rules."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

# A wheel has copies; an editable installation has the checkout.
_WHEEL = Path(__file__).parents[1] / "deploy"
_CHECKOUT = Path(__file__).parents[3] / "deploy"
# The rules' own tests, which no deployment needs, are in the checkout alone.
_TESTS = "prometheus/tests/"
_RULE = re.compile(r"^ *- (?:alert|record): *(\S+)", re.MULTILINE)


def _deploy() -> Path:
    return _WHEEL if _WHEEL.is_dir() else _CHECKOUT


def files() -> dict[str, Path]:
    """Each file to deploy, by its path in the folder `deploy`."""
    folder = _deploy()
    found = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*"))}
    return {
        name: path for name, path in found.items() if path.is_file() and not name.startswith(_TESTS)
    }


def board_files() -> dict[str, dict[str, Any]]:
    """Each board as Grafana imports it, by the name of its file."""
    folder = _deploy() / "grafana" / "dashboards"
    return {
        path.name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.json"))
    }


def rule_names() -> dict[str, str]:
    """The file of each rule and alert, by its name."""
    folder = _deploy() / "prometheus"
    # Read without a parser: YAML is none of the dependencies.
    return {
        name: f"{path.parent.name}/{path.name}"
        for kind in ("rules", "alerts")
        for path in sorted((folder / kind).glob("*.yml"))
        for name in _RULE.findall(path.read_text(encoding="utf-8"))
    }
