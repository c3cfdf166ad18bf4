"""otel-ddp report: the two files it writes, and what it says where it cannot."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from histories import write_history
from otel_ddp.cli import main

S = 10**9


def test_it_writes_a_page_and_json_of_the_newest_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_history(tmp_path, "old", steps=60, began_ns=10**18)
    write_history(tmp_path, "new", steps=60, began_ns=10**18 + 10**12)
    out = tmp_path / "a" / "b"
    os.environ["OTEL_DDP_HISTORY_DIR"] = str(tmp_path)

    assert main(["report", "--out", str(out)]) == 0

    content = json.loads((out / "report.json").read_text())
    assert (content["format"], content["schema"]) == ("otel_ddp report", 8)
    assert content["run"]["run"] == "new"
    assert (out / "report.html").read_text().startswith("<!doctype html>")
    said = capsys.readouterr().out
    assert said.startswith("otel_ddp: run sweep/new finished after 1.")
    assert str(out / "report.html") in said


@pytest.mark.parametrize("depth", [900, 100_000])
def test_no_nesting_in_a_history_is_too_deep_for_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], depth: int
) -> None:
    path = write_history(tmp_path, "deep", steps=60, late=1, about={"config": {"lr": 0.1}})
    with closing(sqlite3.connect(path)) as db, db:
        assert db.execute(
            "UPDATE ranks SET about = ?", ('{"a":' * depth + "1" + "}" * depth,)
        ).rowcount

    codes = [
        main(["report", str(path), "--out", str(tmp_path / "out")]),
        main(["report", str(path), "--card"]),
        main(["compare", str(path), str(path)]),
    ]

    # A file that is damaged, or a run of which this part is not known.
    said = capsys.readouterr().err
    assert codes == [0, 0, 0] or "is damaged" in said


def test_the_card_alone_writes_nothing_and_a_report_a_folder_here_whatever_the_runs_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_history(tmp_path / "h", "../../x y", steps=60)
    monkeypatch.chdir(tmp_path)
    os.environ["OTEL_DDP_HISTORY_DIR"] = str(tmp_path / "h")

    assert main(["report", "--card"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["h"]
    assert "finished after" in capsys.readouterr().out

    assert main(["report"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["h", "report-_.._x_y"]


def test_a_folder_here_does_not_hide_the_run_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_history(tmp_path / "h", "a", steps=60)
    write_history(tmp_path / "a", "other", steps=60)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTEL_DDP_HISTORY_DIR", str(tmp_path / "h"))

    assert main(["report", "a", "--card"]) == main(["report", "./a", "--card"]) == 0

    lines = capsys.readouterr().out.splitlines()
    titles = [line.split()[2] for line in lines if line.startswith("otel_ddp: run ")]
    assert titles == ["sweep/a", "sweep/other"]


@pytest.mark.parametrize("name", ["~nobody-of-this-name", "x" * 5000])
@pytest.mark.parametrize("command", ["report", "open", "replay", "compare"])
def test_no_name_is_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, name: str
) -> None:
    os.environ["OTEL_DDP_HISTORY_DIR"] = str(tmp_path)

    assert main([command, name, *([name] if command == "compare" else [])]) == 2
    assert "is no" in (said := capsys.readouterr().err) or "cannot be read" in said


def test_where_there_is_no_run_it_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["OTEL_DDP_HISTORY_DIR"] = str(tmp_path)

    assert main(["report"]) == 2

    assert f"{tmp_path} has no history of a run." in capsys.readouterr().err


@pytest.mark.parametrize("command", ["report", "goodput", "open", "compare"])
def test_an_empty_name_is_not_the_newest_run(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([command, "", *([""] if command == "compare" else [])])

    assert "the name of a run is empty" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")
def test_a_name_is_not_looked_up_in_a_folder_of_another_user(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "h"
    path = write_history(folder, "a", steps=60)
    write_history(folder, "b", steps=60)
    os.chown(folder, 65534, 65534)
    os.environ["OTEL_DDP_HISTORY_DIR"] = str(folder)

    assert main(["report", "--card"]) == 2
    assert main(["report", "--card", "a"]) == 2
    assert main(["compare", "a", "b"]) == 2
    said = f"no history is read: {folder} belongs to user 65534, not to us"
    assert capsys.readouterr().err.count(said) == 3
    # Here and now a person names it.
    assert main(["report", "--card", str(path)]) == 0
