"""deploy/systemd: closed but for what the agent needs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import commands
from deploy.files import DEPLOY, tool

UNIT = DEPLOY / "systemd" / "otel-ddp-agent@.service"


def directives() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def test_journals_lie_where_neither_private_tmp_hides_nor_an_end_removes_them() -> None:
    unit = directives()
    places = dict(each.split("=", 1) for each in unit["Environment"])

    assert places["OTEL_DDP_DIR"] == f"%t/{unit['RuntimeDirectory'][0]}"
    assert unit["RuntimeDirectoryPreserve"] == ["yes"]
    assert unit["RuntimeDirectoryMode"] == ["0700"]
    # It would take the shared memory of the trainings along.
    assert unit["RemoveIPC"] == ["no"]
    for name in ("OTEL_DDP_SPOOL_DIR", "OTEL_DDP_HISTORY_DIR"):
        assert places[name].startswith(f"%S/{unit['StateDirectory'][0]}/")


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
