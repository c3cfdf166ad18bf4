"""deploy/systemd: closed but for what the agent needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import commands
from deploy.files import DEPLOY, tool

UNIT = DEPLOY / "systemd" / "otel-ddp-agent@.service"


def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    analyze = tool("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd-analyze here")
    # What it starts is not installed on this machine.
    text = UNIT.read_text().replace("/opt/otel-ddp/bin/otel-ddp agent", f"{sys.executable} -V")
    unit = tmp_path / "otel-ddp-agent@alice.service"
    unit.write_text(text)

    verified = commands.run(analyze, "verify", unit)
    judged = commands.run(analyze, "security", "--offline=true", "--threshold=25", unit)

    assert (verified.returncode, verified.stderr) == (0, "")
    assert judged.returncode == 0, judged.stdout
