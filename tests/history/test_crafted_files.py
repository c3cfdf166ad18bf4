"""Files that somebody has made to be read here: named, told of and left alone."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from histories import write_history
from otel_ddp.cli import main
from otel_ddp.history.page.runs import Runs
from otel_ddp.history.reader import History, Unreadable
from otel_ddp.history.run_file import RunFile, Unusable

_ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"


@pytest.mark.parametrize(
    "change",
    [
        f"DROP TABLE events; CREATE VIEW events AS {_ENDLESS}",
        f"CREATE TRIGGER t AFTER INSERT ON about BEGIN INSERT INTO ranks {_ENDLESS}, 'x'; END",
        "DROP TABLE about; CREATE TABLE about (key, value AS (zeroblob(1 << 30)))",
        f"CREATE VIEW other AS {_ENDLESS}",
    ],
)
def test_only_our_own_tables_are_read_or_written(tmp_path: Path, change: str) -> None:
    path = write_history(tmp_path, ranks=1, steps=20)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(change)

    with pytest.raises(Unreadable, match="it has other tables"):
        History(path)
    with pytest.raises(Unusable):
        RunFile(path)


@pytest.mark.parametrize("suffix", ["", "-journal", "-wal", "-shm"])
def test_nothing_waits_for_a_fifo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    path = write_history(tmp_path, ranks=1, steps=20)
    if not suffix:
        path.unlink()
    os.mkfifo(f"{path}{suffix}")

    status = main(["report", str(tmp_path), "--card"])
    rows, faults = Runs(tmp_path, ours=False).rows()

    assert (status, rows) == (2, [])
    assert path.name in capsys.readouterr().err or not suffix
    assert len(faults) == (1 if suffix else 0)


def test_nothing_is_left_beside_the_database_of_another_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.sqlite"
    # What a program has left that was killed: SQLite would recover it.
    with closing(sqlite3.connect(tmp_path / "made")) as made:
        made.execute("PRAGMA journal_mode = WAL")
        made.execute("CREATE TABLE t (a)")
        made.commit()
        for suffix in ("", "-wal"):
            Path(f"{path}{suffix}").write_bytes((tmp_path / f"made{suffix}").read_bytes())
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}

    assert main(["report", str(path)]) == main(["report", str(tmp_path)]) == 2
    assert Runs(tmp_path, ours=False).rows()[0] == []
    assert capsys.readouterr().err.count("is no history of a run") == 2
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_a_history_is_known_from_its_first_moment(tmp_path: Path) -> None:
    file = RunFile(tmp_path / "a.sqlite")
    # As if its agent were killed before SQLite moves the log into the file.
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(file.path.read_bytes())
    file.close()

    with History(copy) as history:
        assert history.ranks == {}
