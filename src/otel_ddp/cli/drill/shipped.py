"""Finds the boards and the names of the rules that come with this version."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

# A wheel has copies beside this file; an editable installation has the checkout.
_WHEEL = Path(__file__).with_name("deploy")
_CHECKOUT = Path(__file__).parents[4] / "deploy"
_RULE = re.compile(r"^ *- (?:alert|record): *(\S+)", re.MULTILINE)


def _deploy() -> Path:
    return _WHEEL if _WHEEL.is_dir() else _CHECKOUT


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
