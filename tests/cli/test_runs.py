"""otel-ddp runs: the table of the runs that are kept."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from histories import S, write_history
from otel_ddp.cli import main

DAY = 24 * 3600 * S


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
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
    values = [last("lr", 1e-4), loss, last("acc", None), last("x", 1)]
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
