"""otel-ddp goodput: what it says of the histories of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from histories import two_attempts, write_history
from otel_ddp.cli import main

FIRST = {"attempt": 1, "began_ns": 10**18, "first_step": 0, "last_step": 99}
SECOND = {**FIRST, "attempt": 2, "first_step": 60, "repeated_steps": 40}


@pytest.fixture(autouse=True)
def _written(tmp_path: Path) -> None:
    """A run of two nodes; the end of its first attempt was not seen."""
    for node, late in (("node-0", {}), ("node-1", {"rank 0 (node-0)": 10.0})):
        seconds = {"productive": 90.0, "start": 10.0, "late_rank": sum(late.values())}
        time = {"seconds": seconds, "late": late, "ranks": {}}
        about = {"time": time, "attempts": [FIRST, SECOND]}
        first_rank = 0 if node == "node-0" else 4
        write_history(tmp_path, "again", node=node, first_rank=first_rank, steps=60, about=about)
    os.environ["OTEL_DDP_HISTORY_DIR"] = str(tmp_path)


def test_the_seconds_of_all_nodes_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", "again", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)["goodput"]
    assert found["seconds"] == {"productive": 180.0, "start": 20.0, "late_rank": 10.0}
    assert (found["rank_s"], found["share"]) == (210.0, round(180 / 210, 6))


def test_only_the_last_attempt_may_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", "again"]) == 0

    first, second = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert first[-4:] == ["0", "99", "-", "-"]
    assert second[-5:] == ["60", "99", "40", "goes", "on"]


def test_it_says_how_long_it_took_to_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_history(tmp_path, "back", steps=9, about=two_attempts(10**18))

    assert main(["goodput", "back"]) == 0

    heads, first, second = capsys.readouterr().out.splitlines()[-3:]
    place = slice(heads.index("back after"), heads.index("back after") + len("back after"))
    assert (first[place].strip(), second[place].strip()) == ("-", "7 s")
