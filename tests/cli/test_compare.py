"""otel-ddp compare: what it prints, and its exit status for a job."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from histories import write_history
from otel_ddp.cli import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("histories")
    write_history(found, "a", seed=1, ranks=2, steps=200)
    write_history(found, "b", seed=2, ranks=2, steps=200)
    write_history(found, "slow", seed=3, ranks=2, steps=200, slower={"forward": 1.05})
    return found


def compare(folder: Path, *words: str) -> int:
    os.environ["OTEL_DDP_HISTORY_DIR"] = str(folder)
    return main(["compare", *words])


def test_equal_runs_pass(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(folder, "a", "b", "--fail-if-worse") == 0

    said = capsys.readouterr().out
    assert "Result: no significant difference" in said
    assert "A: 190 steps, without 10 to warm up." in said


def test_a_run_that_is_worse_fails_the_job_that_asks_for_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(folder, "a", "slow") == 0
    assert compare(folder, "a", "slow", "--fail-if-worse") == 1
    assert compare(folder, "slow", "a", "--fail-if-worse") == 0

    said = capsys.readouterr().out
    assert said.count("Result: worse: step_time +1.6 %, throughput -1.6 %, forward +5.1 %") == 2
    assert said.count("Result: better: step_time") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("a", "nowhere"), "no history of a run with this name; it has a, b, slow"),
        (("a", ",,,"), "',,,' names no run: give one"),
    ],
)
def test_what_cannot_be_compared_is_said_and_no_verdict(
    folder: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], sentence: str
) -> None:
    assert compare(folder, *words) == 2

    assert sentence in capsys.readouterr().err


def test_a_name_may_have_commas(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, name in enumerate(("lr=0.1,bs=32", "lr=0.1,bs=64", "lr=0.1")):
        write_history(tmp_path, name, seed=seed, ranks=1, steps=60)

    assert compare(tmp_path, "lr=0.1,bs=32", "sweep/lr=0.1,bs=64") == 0

    said = [line for line in capsys.readouterr().out.splitlines() if line[:3] in ("A  ", "B  ")]
    assert said == [
        "A  sweep/lr=0.1,bs=32",
        "B  sweep/lr=0.1,bs=64",
    ]


def test_json_is_for_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(folder, "a", "slow", "--json", "--fail-if-worse") == 1

    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["rows"] if row["kind"] == "step"}
    assert rows["forward"]["verdict"] == "worse"
    assert rows["forward"]["p"] < 0.01
    assert rows["forward"]["change"] == pytest.approx(0.05, abs=0.003)
