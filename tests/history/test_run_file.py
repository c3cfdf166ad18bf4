"""A history holds all that was written, in fewer buckets the longer its run is."""

from __future__ import annotations

import contextlib
import math
import os
import random
import re
import sqlite3
from pathlib import Path

import pytest

from histories import value_rows, write_history
from otel_ddp.cli import main
from otel_ddp.history import run_file
from otel_ddp.history.buckets import StepBucket, step_row
from otel_ddp.history.page.runs import Runs
from otel_ddp.history.reader import History, Unreadable
from otel_ddp.history.run_file import RunFile, Unusable
from otel_ddp.history.tables import SeriesKey
from otel_ddp.vocabulary.words import MEASURED_PHASES, PHASES

LOSS = SeriesKey("value", "loss", "0", (("split", "train"),))
S = 10**9


def filled(path: Path, values: list[float], piece: int = 100) -> History:
    """A history with these values of one series, a step each, written piece by piece."""
    file = RunFile(path)
    for at in range(0, len(values), piece):
        points = [
            (step, (step + 1) * S, values[step]) for step in range(at, min(at + piece, len(values)))
        ]
        file.write(rows={LOSS: value_rows(points)})
    file.close()
    return History(path)


def read_whole(history: History) -> None:
    for series in history.series():
        history.columns(series)


def test_a_long_run_keeps_extremes_sums_and_the_last_of_each_bucket(tmp_path: Path) -> None:
    values = [math.sin(step * 1.7) for step in range(20_000)]

    with filled(tmp_path / "a.sqlite", values, piece=777) as history:
        [series] = history.series()
        buckets = history.sums(series)
    assert 2048 <= len(buckets) <= 4096
    assert all(each.first % series.width == 0 for each in buckets)
    for each in buckets:
        own = values[each.first : each.until + 1]
        assert (each.low, each.high, each.last) == (min(own), max(own), own[-1])
        assert each.finite == len(own)
        assert each.total == pytest.approx(sum(own))


def test_values_that_come_in_any_order_are_kept_in_that_of_their_steps(tmp_path: Path) -> None:
    steps = [*range(-200, 200), *range(10_000, 20_000, 777), -(2**62), 2**62]
    random.Random(1).shuffle(steps)
    file = RunFile(tmp_path / "a.sqlite")
    for at in range(0, len(steps), 50):
        points = [(step, S + step % 1000, step / 3) for step in steps[at : at + 50]]
        file.write(rows={LOSS: value_rows(points)})
    assert file.last(LOSS) == 2**62
    file.close()

    with History(tmp_path / "a.sqlite") as history:
        [series] = history.series()
        found = history.sums(series)
        some = history.sums(series, -70, 12_000)
        few = history.sums(series, -70, 12_000, most=5)
    assert [(each.first, each.first_ns, each.last) for each in found] == [
        (step, S + step % 1000, step / 3) for step in sorted(steps)
    ]
    assert [each.first for each in some] == [s for s in sorted(steps) if -70 <= s <= 12_000]
    assert [each.finite for each in few] == [55, 55, 55, 55, 53]


def test_a_bucket_that_is_written_in_pieces_is_one_and_its_last_value_the_latest(
    tmp_path: Path,
) -> None:
    file = RunFile(tmp_path / "a.sqlite")
    for time_ns, value in ((2 * S, 5.0), (9 * S, 7.0), (3 * S, 6.0)):
        file.write(rows={LOSS: value_rows([(4, time_ns, value)])})
    file.close()

    with History(tmp_path / "a.sqlite") as history:
        [bucket] = history.sums(history.series()[0])
    assert (bucket.finite, bucket.low, bucket.high, bucket.last) == (3, 5.0, 7.0, 7.0)
    assert (bucket.first_ns, bucket.last_ns) == (2 * S, 9 * S)


def test_what_an_attempt_does_again_replaces_all_that_an_earlier_one_did_from_there_on(
    tmp_path: Path,
) -> None:
    file = RunFile(tmp_path / "a.sqlite")
    file.write(rows={LOSS: value_rows([(step, S, 9.0) for step in range(8)])})
    # It goes on from step 2, and logs at other steps: in two pieces, and twice in one of them.
    for steps in ([2, 4], [4]):
        points = [(step, 20 * S, 1.0) for step in steps]
        file.write(rows={LOSS: value_rows(points)}, attempt_ns=10 * S)
    file.close()

    with History(tmp_path / "a.sqlite") as history:
        found = history.sums(history.series()[0])
    assert [(each.first, each.finite, each.last) for each in found] == [
        *((0, 1, 9.0), (1, 1, 9.0), (2, 1, 1.0), (4, 2, 1.0))
    ]


def test_a_wide_bucket_keeps_the_steps_before_those_that_are_done_again(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    filled(path, [9.0] * 5000).close()
    file = RunFile(path)
    # From the second step of a bucket on.
    points = [(step, 9000 * S, 1.0) for step in range(101, 104)]
    file.write(rows={LOSS: value_rows(points)}, attempt_ns=8000 * S)
    file.close()

    with History(path) as history:
        [series] = history.series()
        found = {each.first - each.first % 2: each for each in history.sums(series)}
    assert series.width == 2
    assert [(found[at].finite, found[at].high) for at in (98, 100, 102)] == [
        *((2, 9.0), (3, 9.0), (2, 1.0))
    ]
    assert max(found) == 102


def test_many_series_share_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_file, "_MOST_BUCKETS", 1000)
    monkeypatch.setattr(run_file, "_MOST_SERIES", 10)
    file = RunFile(tmp_path / "a.sqlite")
    keys = [SeriesKey("value", f"name{number}", "0") for number in range(12)]
    for at in range(0, 4000, 500):
        file.write(
            rows={key: value_rows([(s, s * S, 1.0) for s in range(at, at + 500)]) for key in keys}
        )
    file.close()

    with History(tmp_path / "a.sqlite") as history:
        assert len(history.series()) == 10
        assert all(len(history.sums(each)) <= 100 for each in history.series())
        assert all(sum(b.finite for b in history.sums(each)) == 4000 for each in history.series())


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    file = RunFile(tmp_path / "a.sqlite")
    file.write(rows={LOSS: value_rows([(0, S, 1.0)])}, positions={"j": (7, 0, 0)})
    broken = step_row(1, 0, 1, b"", (), 1 << 70, False)
    with pytest.raises(OverflowError):
        file.write(
            rows={LOSS: value_rows([(1, S, 1.0)]), SeriesKey("steps", "host", "0"): [broken]},
            positions={"j": (9, 0, 0)},
        )
    assert file.read_positions() == {"j": (7, 0, 0)}
    file.write(rows={LOSS: value_rows([(2, S, 1.0)])})
    file.close()

    with History(tmp_path / "a.sqlite") as history:
        assert [each.first for each in history.sums(history.series()[0])] == [0, 2]


_ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("CREATE TABLE trials (value)", "another program|other tables"),
        (f"DROP TABLE events; CREATE VIEW events AS {_ENDLESS}", "another program|other tables"),
        ("PRAGMA user_version = 99", "another version"),
    ],
)
def test_what_another_program_or_another_version_has_made_is_left_alone(
    tmp_path: Path, change: str, why: str
) -> None:
    path = write_history(tmp_path, ranks=1, steps=20)
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(change)
    before = path.read_bytes()

    with pytest.raises(Unusable, match=why):
        RunFile(path)
    with pytest.raises(Unreadable, match=why):
        History(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "change", ["count = 65", "count = 0", "content = x''", "content = substr(content, 1, 100)"]
)
def test_a_damaged_block_is_told_of(tmp_path: Path, change: str) -> None:
    path = write_history(tmp_path)
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute(f"UPDATE blocks SET {change}")

    with pytest.raises(Unreadable, match="is damaged"), History(path) as history:
        read_whole(history)


@pytest.mark.parametrize("content", [b"", b"no database at all" * 100, None])
def test_a_damaged_file_is_told_of(tmp_path: Path, content: bytes | None) -> None:
    good = write_history(tmp_path, "good")
    bad = tmp_path / "bad.sqlite"
    bad.write_bytes(good.read_bytes()[:-9000] if content is None else content)

    with History(good) as history:
        assert history.about["run"] == "good"
    with pytest.raises(Unreadable, match=re.escape(bad.name)), History(bad) as history:
        # Its first pages may be whole: what is asked for later is not.
        read_whole(history)


def test_what_a_killed_agent_left_beside_a_history_is_read(tmp_path: Path) -> None:
    file = RunFile(tmp_path / "a.sqlite")
    file.write(about={"run": "a"})
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("a.sqlite", "a.sqlite-wal"):
        (copy / name).write_bytes((tmp_path / name).read_bytes())
    file.close()

    with History(copy / "a.sqlite") as history:
        assert history.about == {"run": "a"}


def test_the_time_of_each_phase_lies_in_its_own_column_and_any_other_in_other() -> None:
    codes = bytes([*(PHASES[word] for word in MEASURED_PHASES), PHASES["unmeasured"], 40])
    spans_ns = [10**at for at in range(len(codes))]

    found = StepBucket.of(step_row(1, 0, 1, codes, spans_ns, 0, False)).phases_ns

    own = dict(zip(MEASURED_PHASES, spans_ns, strict=False))
    assert found == {**own, "other": own["other"] + sum(spans_ns[-2:])}


# -- files that somebody has made to be read here


def test_nothing_waits_for_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.sqlite")

    assert main(["report", str(tmp_path), "--card"]) == 2
    assert Runs(tmp_path, ours=False).rows() == ([], [])


def test_nothing_is_left_beside_the_database_of_another_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.sqlite"
    # What a program has left that was killed: SQLite would recover it.
    with contextlib.closing(sqlite3.connect(tmp_path / "made")) as made:
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
