"""otel-ddp runs, goodput and compare: what they say of the histories of runs."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from histories import S, two_attempts, write_history
from otel_ddp.cli import main

DAY = 24 * 3600 * S


@pytest.fixture(autouse=True)
def _utc() -> None:
    os.environ["TZ"] = "UTC"
    time.tzset()


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    os.environ["OTEL_DDP_HISTORY_DIR"] = str(folder)
    assert main(["runs"]) == 0
    return capsys.readouterr().out.splitlines()


def last(name: str, value: object, split: str = "", way: str = "") -> dict[str, object]:
    return {"name": name, "split": split, "direction": way, "last": {"value": value, "step": 59}}


def test_runs_are_listed_the_newest_first_with_their_end_and_last_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = last("loss", 0.25, "train", "min")
    # An earlier attempt has logged the second, this one has not yet.
    values = [
        last("lr", 1e-4),
        last("mse", 1) | {"last": None},
        loss,
        last("acc", None),
        last("x", 1),
    ]
    write_history(tmp_path, "old", steps=60, ranks=2, began_ns=20_000 * DAY)
    for node, first_rank in (("n0", 0), ("n1", 2)):
        write_history(
            *(tmp_path, "new"),
            group="",
            node=node,
            ranks=2,
            first_rank=first_rank,
            steps=60,
            began_ns=20_001 * DAY,
            state="failed",
            about={"summary": values if node == "n0" else [], "environment": {"world_size": 4}},
        )

    assert shown(tmp_path, capsys) == [
        "run        state     began                ended                nodes  world  step  "
        "last values",
        "new        failed    2024-10-05 00:00:00  2024-10-05 00:00:01      2      4    59  "
        "loss 0.25, lr 0.0001, acc NaN and 1 more",
        "sweep/old  finished  2024-10-04 00:00:00  2024-10-04 00:00:01      1      2    59",
    ]


def test_a_run_whose_agent_was_killed_has_no_end_but_was_last_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_history(tmp_path, "lost", steps=60, began_ns=20_000 * DAY, state="running")

    assert (
        "running  2024-10-04 00:00:00  last seen 2024-10-04 00:00:01" in shown(tmp_path, capsys)[1]
    )


def test_a_name_can_do_nothing_to_the_terminal_and_a_damaged_file_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_history(tmp_path, "a\x1b[31m\n", steps=10, about={"summary": [last("\x1b", "x")]})
    (tmp_path / "bad.sqlite").write_bytes(b"no database" * 500)

    lines = shown(tmp_path, capsys)

    assert lines[1].startswith(r"sweep/a\x1b[31m\n  finished")
    assert lines[1].endswith(r"  \x1b -")
    assert lines[2].startswith(f"! {tmp_path}/bad.sqlite is no history of a run")


def test_an_empty_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(tmp_path, capsys) == [f"no run is kept in {tmp_path}"]


# -- goodput


FIRST = {"attempt": 1, "began_ns": 10**18, "first_step": 0, "last_step": 99}
SECOND = {**FIRST, "attempt": 2, "first_step": 60, "repeated_steps": 40}


@pytest.fixture
def _written(tmp_path: Path) -> None:
    """A run of two nodes; the end of its first attempt was not seen."""
    for node, late in (("node-0", {}), ("node-1", {"rank 0 (node-0)": 10.0})):
        seconds = {"productive": 90.0, "start": 10.0, "late_rank": sum(late.values())}
        time = {"seconds": seconds, "late": late, "ranks": {}}
        about = {"time": time, "attempts": [FIRST, SECOND]}
        first_rank = 0 if node == "node-0" else 4
        write_history(tmp_path, "again", node=node, first_rank=first_rank, steps=60, about=about)
    os.environ["OTEL_DDP_HISTORY_DIR"] = str(tmp_path)


@pytest.mark.usefixtures("_written")
def test_the_seconds_of_all_nodes_add_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", "again", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)["goodput"]
    assert found["seconds"] == {"productive": 180.0, "start": 20.0, "late_rank": 10.0}
    assert (found["rank_s"], found["share"]) == (210.0, round(180 / 210, 6))


@pytest.mark.usefixtures("_written")
def test_only_the_last_attempt_may_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["goodput", "again"]) == 0

    first, second = (line.split() for line in capsys.readouterr().out.splitlines()[-2:])
    assert first[-4:] == ["0", "99", "-", "-"]
    assert second[-5:] == ["60", "99", "40", "goes", "on"]


@pytest.mark.usefixtures("_written")
def test_it_says_how_long_it_took_to_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_history(tmp_path, "back", steps=9, about=two_attempts(10**18))

    assert main(["goodput", "back"]) == 0

    heads, first, second = capsys.readouterr().out.splitlines()[-3:]
    place = slice(heads.index("back after"), heads.index("back after") + len("back after"))
    assert (first[place].strip(), second[place].strip()) == ("-", "7 s")


# -- compare


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
    assert "No significant difference." in said
    assert "A: 190 steps, without 10 to warm up." in said


def test_a_run_that_is_worse_fails_the_job_that_asks_for_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(folder, "a", "slow") == 0
    assert compare(folder, "a", "slow", "--fail-if-worse") == 1
    assert compare(folder, "slow", "a", "--fail-if-worse") == 0

    said = capsys.readouterr().out
    assert said.count("Worse: step_time +1.6 %, throughput -1.6 %, forward +5.1 %") == 2
    assert said.count("Better: step_time") == 1


def test_what_cannot_be_compared_is_said_and_no_verdict(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(folder, "a", "nowhere") == 2

    sentence = "no history of a run with this name; it has a, b, slow"
    assert sentence in capsys.readouterr().err


def test_json_is_for_programs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(folder, "a", "slow", "--json", "--fail-if-worse") == 1

    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["rows"] if row["kind"] == "step"}
    assert rows["forward"]["verdict"] == "worse"
    assert rows["forward"]["p"] < 0.01
    assert rows["forward"]["change"] == pytest.approx(0.05, abs=0.003)
