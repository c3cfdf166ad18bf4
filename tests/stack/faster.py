"""The deployed Prometheus configuration for tests, its rules running so many times as fast."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from stack.servers import DEPLOY

# Nobody waits five minutes in a test: the rules' clock runs so many times as fast.
FASTER = 12
_UNITS_S = {"s": 1, "m": 60, "h": 3600}
_DURATION = re.compile(r"(?<=\[)\d+[smh](?=\])|(?<=offset )\d+[smh]")
_FOR = re.compile(r"^(\s*(?:for|interval|keep_firing_for): )(\d+[smh])$", re.MULTILINE)


def faster(rules: str) -> str:
    """The same rules, each duration in them divided; counts of samples stay as they are."""

    def shorter(duration: str) -> str:
        return f"{int(duration[:-1]) * _UNITS_S[duration[-1]] * 1000 // FASTER}ms"

    rules = _DURATION.sub(lambda found: shorter(found[0]), rules)
    return _FOR.sub(lambda found: found[1] + shorter(found[2]), rules)


def deployed(folder: Path) -> dict[str, Any]:
    """deploy/prometheus/prometheus.yml with its rules and alerts, faster ones, from `folder`."""
    folder.mkdir()
    for kind in ("rules", "alerts"):
        for path in sorted((DEPLOY / "prometheus" / kind).glob("*.yml")):
            (folder / f"{kind}-{path.name}").write_text(faster(path.read_text()))
    config: dict[str, Any] = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["rule_files"] = [str(folder / "*.yml")]
    return config
