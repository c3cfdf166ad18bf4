"""What comes is kept once; a disk that fails costs what no longer waits, and that is told."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fed import IDENTITY, Fed
from histories import kept_steps
from make import step_of
from otel_ddp.agent.history import histories as module
from otel_ddp.agent.history import kept_run
from otel_ddp.agent.history.histories import Collector, Histories
from otel_ddp.agent.history.kept_run import Batch, KeptRun, State
from otel_ddp.agent.history.run_time import ProcessTime
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.reading.process import News
from otel_ddp.diagnosis.steps import Parts
from otel_ddp.history import directory, run_file
from otel_ddp.history.directory import file_name
from otel_ddp.history.reader import History
from otel_ddp.journal.layout import EVENT
from otel_ddp.journal.parser import Document, Name, Scalars
from otel_ddp.settings import MIB
from otel_ddp.vocabulary.words import UNMEASURED

RUN = ("g", "r")
S, MS = 10**9, 10**6
NAMES = {1: Name("loss", "train")}
NOTHING = State({}, {}, (), ())
OTHER = 65534

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's files")


def batch(first: int, count: int, *, journal: str = "j0", rank: str = "0", **more: Any) -> Batch:
    """What is read of a rank: so many steps of 10 ms, each with a value and a line.

    *more*: other news.
    """
    numbers = range(first, first + count)
    steps = [step_of(n, n * 10 * MS, [(2, 7 * MS), (4, 3 * MS)]) for n in numbers if n]
    news = News(
        scalars=[Scalars((n + 1) * S, n, None, (1,), (n / 3,), 100 * n + 1) for n in numbers],
        steps=steps,
        device_steps=[],
        estimated=steps,
        device_estimated=[],
        events=[
            Document(EVENT, {"time": n, "name": "", "body": f"line {n}", "step": n}, 100 * n + 2)
            for n in numbers
        ],
        spans=[],
        overwritten=[],
    )
    until = 100 * (first + count)
    process = ProcessTime(rank, 1, 1, 0, "running", journal=journal)
    return Batch(RUN, process, until, NAMES, news._replace(**more))


def kept(path: Path) -> tuple[int, int, int]:
    """How many values, steps and events a history has."""
    with History(path) as history:
        values = [sum(b.finite for b in history.sums(each)) for each in history.series("value")]
        steps = [
            sum(b.steps for b in kept_steps(history, each)) for each in history.series("steps")
        ]
        return sum(values), sum(steps), len(history.events())


@contextlib.contextmanager
def opened(path: Path) -> Iterator[KeptRun]:
    """The history of a run, as an agent keeps it until it ends."""
    run = KeptRun(path)
    run.open()
    yield run
    run.write(1)
    run.close()


def made_by_an_agent(path: Path) -> None:
    with opened(path):
        pass


def test_what_is_read_twice_is_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with opened(path) as run:
        run.feed(batch(0, 10))
        run.write(1)
        run.feed(batch(5, 10))
    # Another agent, which reads all of it once more.
    with opened(path) as other:
        other.feed(batch(0, 20))
        other.feed(batch(0, 3, journal="j1", rank="1"))

    assert kept(path) == (23, 21, 23)


def test_values_without_steps_go_on_where_the_agent_before_was(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    for first in (1, 3):
        with opened(path) as run:
            scalars = [
                Scalars(n * S, None, None, (1,), (float(n),), 100 * n)
                for n in range(first, first + 2)
            ]
            run.feed(batch(0, 0, scalars=scalars))

    with History(path) as history:
        (series,) = history.series("value")
        assert [each.total for each in history.sums(series)] == [1.0, 2.0, 3.0, 4.0]


def _later(earlier: Batch) -> Batch:
    """The same a minute later, by another process."""
    news, later_ns = earlier.news, 60 * S
    steps = [
        each._replace(began_ns=each.began_ns + later_ns, ended_ns=each.ended_ns + later_ns)
        for each in news.steps
    ]
    scalars = [each._replace(time_ns=each.time_ns + later_ns) for each in news.scalars]
    process = earlier.process._replace(journal="later", began_ns=later_ns, started_ns=later_ns)
    return earlier._replace(
        process=process,
        news=news._replace(scalars=scalars, steps=steps, estimated=steps),
    )


# A first attempt came to step 9, and the next one begins a minute later at step 5 and comes to 7.
OF_TWO_ATTEMPTS = {**dict.fromkeys(range(5), (0, 1)), **dict.fromkeys(range(5, 8), (1, 1))}


def _minutes_and_counts(path: Path) -> dict[int, tuple[int, int]]:
    """By step: when its first value was logged, in minutes, and how many there are."""
    with History(path) as history:
        (series,) = history.series("value")
        return {
            each.first: (each.first_ns // (60 * S), each.finite) for each in history.sums(series)
        }


@pytest.mark.parametrize("steps", [{}, {"steps": [], "estimated": []}], ids=["trains", "logs"])
def test_attempts_that_are_read_at_once_are_kept_as_if_each_had_been_written(
    tmp_path: Path, steps: dict[str, Any]
) -> None:
    with opened(tmp_path / "a.sqlite") as run:
        run.feed(batch(0, 10, **steps))
        # It goes on from step 5, and has not come as far.
        run.feed(_later(batch(5, 3, **steps)))

    assert _minutes_and_counts(run.path) == OF_TWO_ATTEMPTS


def test_what_an_earlier_attempt_did_and_comes_late_is_kept_up_to_where_the_next_one_began(
    tmp_path: Path,
) -> None:
    with opened(tmp_path / "a.sqlite") as run:
        run.feed(batch(0, 3))
        run.feed_state(State({}, {}, (), (), [ProcessTime("0", 1, 1, 30 * S, "killed")]))
        run.feed(_later(batch(5, 3)))
        run.write(1)
        run.feed(batch(3, 7))

    assert _minutes_and_counts(run.path) == OF_TWO_ATTEMPTS
    with History(run.path) as history:
        (series,) = history.step_series.values()
        # It is not known yet which steps the later attempt has made.
        assert [each.first for each in kept_steps(history, series)] == [*range(1, 10)]
        assert len(history.about["attempts"]) == 2


def test_a_process_whose_clock_is_measured_anew_begins_no_attempt(tmp_path: Path) -> None:
    path, first = tmp_path / "a.sqlite", batch(1, 10)
    # This agent is killed before it writes a state with the process.
    with opened(path) as run:
        run.feed(first)
    with opened(path) as other:
        other.feed(batch(11, 5)._replace(process=first.process._replace(began_ns=2, started_ns=2)))

    with History(path) as history:
        assert [each["attempt"] for each in history.about["attempts"]] == [1]


def test_gaps_of_held_steps_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with opened(path) as run:
        run.feed(batch(1, 10))
    file = run_file.RunFile(path)
    file.write(about={"held": {str(rank): [1, 2] for rank in range(150)}})
    file.close()
    with opened(path) as other:
        other.feed(batch(11, 1))

    with History(path) as history:
        assert len(history.about["gaps"]) == 100


def test_steps_that_an_agent_held_as_it_was_killed_are_a_gap(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with opened(path) as run:
        run.feed(batch(1, 10))
        run.feed_state(State({}, {}, (), (), [ProcessTime("0", 1, 1, 30 * S, "killed")]))
        # The restarted rank has logged no step number yet.
        held = _later(batch(1, 5))
        run.feed(held)
        run.write(65 * S)
    with opened(path) as other:
        other.feed(_later(batch(6, 3)))

    with History(path) as history:
        [gap] = history.about["gaps"]
    first, last = held.news.steps[0], held.news.steps[-1]
    assert (gap["since_ns"], gap["until_ns"]) == (first.began_ns, last.ended_ns)
    assert "step numbers of rank 0" in gap["why"]


@pytest.mark.parametrize("state", ["killed", "finished"])
@pytest.mark.parametrize("agents", [1, 2])
def test_an_attempt_without_a_step_replaces_values_from_its_first_one_on(
    tmp_path: Path, state: str, agents: int
) -> None:
    no_steps: Any = {"steps": [], "estimated": []}
    with contextlib.ExitStack() as life:
        run = life.enter_context(opened(tmp_path / "a.sqlite"))
        run.feed(batch(0, 10, **no_steps))
        run.feed_state(State({}, {}, (), (), [ProcessTime("0", 1, 1, 30 * S, state)]))
        run.write(1)
        if agents == 2:
            life.close()
            run = life.enter_context(opened(tmp_path / "a.sqlite"))
        # Its values come before anything else is known of it.
        run.feed(_later(batch(5, 3, **no_steps)))

    assert _minutes_and_counts(run.path) == OF_TWO_ATTEMPTS


def test_steps_that_were_not_measured_are_kept_with_estimates_by_either_clock(
    tmp_path: Path,
) -> None:
    good = batch(1, 8)
    bare = [
        each._replace(parts=Parts(each.began_ns, bytes([UNMEASURED]), (10 * MS,)))
        for each in good.news.steps
    ]
    news = good.news._replace(
        steps=bare, device_steps=bare[-1:], device_estimated=good.news.estimated
    )
    with opened(tmp_path / "a.sqlite") as run:
        run.feed(good._replace(news=news))

    with History(run.path) as history:
        for clock in history.series("steps"):
            buckets = kept_steps(history, clock)
            assert sum(each.took_ns for each in buckets) == 80 * MS
            assert sum(each.phases_ns["forward"] for each in buckets) == 56 * MS
        assert len(history.series("steps")) == 2


def test_what_is_damaged_in_a_record_leaves_the_others(tmp_path: Path) -> None:
    with opened(tmp_path / "a.sqlite") as run:
        good = batch(0, 3)
        bad = [Document(EVENT, {"time": "never"}, 1000), Document(EVENT, {}, 1001)]
        news = good.news._replace(events=[*bad, *good.news.events])
        run.feed(good._replace(names={}, news=news))

    assert kept(tmp_path / "a.sqlite") == (0, 2, 3)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Histories]:
    monkeypatch.setattr(module, "_WRITE_SELDOM_S", 0.0)
    found = Histories(str(tmp_path / "h"), 100 * MIB, "n")
    yield found
    found.stop()


def path_of(made: Histories) -> Path:
    return made.directory / file_name(*RUN, "n")


def test_its_thread_writes_all_before_it_ends(made: Histories) -> None:
    made.thread.keep_running()
    for first in range(0, 100, 10):
        made.feed(batch(first, 10))
        made.feed_states({RUN: NOTHING})
    made.stop()

    assert kept(path_of(made)) == (100, 99, 100)
    assert made.directory.stat().st_mode & 0o777 == 0o700
    assert path_of(made).stat().st_mode & 0o777 == 0o600
    assert not list(made.directory.glob("*-wal"))
    assert made.describe()["problem"] == ""


def test_what_an_agent_had_read_and_could_not_write_before_it_was_killed_is_a_gap(
    tmp_path: Path, made: Histories, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = Fed(tmp_path)

    def collect() -> None:
        fed.poll()
        Collector(made, Ledger(), "n").feed([fed.process])
        made._write_all()

    for number in range(1, 4):
        fed.log({"loss": 1.0}, number)
        if number == 2:
            with monkeypatch.context() as patch:
                patch.setattr(KeptRun, "open", _full)
                collect()
            assert made.has(made.fed)
        else:
            collect()
        fed.process.reader.commit(*fed.process.reader.bookmark())
        for run, _ in made._runs.values():
            run.close()
        made._runs.clear()
        fed.start_again()
    Fed.close_all()

    with History(path_of(made)) as history:
        (series,) = history.series("value")
        assert [each.first for each in history.sums(series)] == [1, 3]
        (gap,) = history.about["gaps"]
    assert gap["why"] == "records of rank 0 were read while nothing could be written"


def test_what_no_longer_waits_is_told_as_a_gap(
    made: Histories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_run, "_MOST_WAITING", 20)
    made.feed(batch(0, 2))
    made._write_all()
    before_ns = time.time_ns()
    monkeypatch.setattr(KeptRun, "open", _full)
    [(run, _)] = made._runs.values()
    run.close()
    for first in range(2, 32, 10):
        made.feed(batch(first, 10))
        made._write_all()
    monkeypatch.undo()
    made.feed(batch(32, 1))
    made._write_all()

    with History(path_of(made)) as history:
        [gap] = history.about["gaps"]
    assert gap["why"] == "No space left on device"
    assert before_ns <= gap["since_ns"] < gap["until_ns"]
    assert kept(path_of(made)) == (3, 2, 3)


def _full(run: KeptRun) -> None:
    raise OSError(28, "No space left on device")


def test_a_rank_whose_journal_is_closed_before_its_end_is_written_has_ended(
    made: Histories, monkeypatch: pytest.MonkeyPatch
) -> None:
    about, over = {"config": {"lr": 0.1}}, {"state": "finished"}
    alive = {rank: {"state": "running"} for rank in ("0", "1")}
    made.feed_states({RUN: State({}, alive, (), ())})
    made._write_all()
    made.feed_states({RUN: State(about, {**alive, "0": over}, (), ())})
    with monkeypatch.context() as patch:
        patch.setattr(KeptRun, "open", _full)
        made._write_all()
    # The journal of rank 0 is closed.
    made.feed_states({RUN: State({}, {"1": over}, (), ())})
    made._write_all()

    with History(path_of(made)) as history:
        assert history.state == "finished"
        assert history.about["config"] == {"lr": 0.1}


def test_an_evaluator_that_starts_first_does_not_take_the_run(
    tmp_path: Path, made: Histories
) -> None:
    collector, found = Collector(made, Ledger(), "n"), []
    for job_type in ("eval", "train"):
        (tmp_path / job_type).mkdir()
        found.append(Fed(tmp_path / job_type, {**IDENTITY, "job_type": job_type}))
        found[-1].poll()
        if job_type == "train":
            found[-1].steps(1, 2, 3)
            found[-1].poll()
        present = [each.process for each in found]
        collector.feed(present)
        collector.feed_states(present, ())
        made._write_all()
    Fed.close_all()

    with History(path_of(made)) as history:
        assert {rank: each["job_type"] for rank, each in history.ranks.items()} == {
            "0": "train",
            "eval/0": "eval",
        }
        assert history.about["job_type"] == "train"
        assert {each.key.rank for each in history.series("steps")} == {"0"}
        assert [each["attempt"] for each in history.about["attempts"]] == [1]


def test_a_run_that_is_started_again_is_seen_after_the_end_of_its_first_attempt(
    tmp_path: Path, made: Histories
) -> None:
    collector, found = Collector(made, Ledger(), "n"), []
    for is_over in (True, False):
        (tmp_path / str(is_over)).mkdir()
        found.append(Fed(tmp_path / str(is_over)))
        found[-1].poll(alive=not is_over)
        collector.feed_states([each.process for each in found], ())
        made._write_all()
    Fed.close_all()

    with History(path_of(made)) as history:
        assert history.about["seen_ns"] > found[0].process.life.ended_ns


def test_what_comes_while_a_disk_hangs_is_bounded(
    made: Histories, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_QUEUED", 40)
    for first in range(0, 50, 10):
        made.feed(batch(first, 10))
    made._write_all()
    made.feed(batch(50, 1))
    made._write_all()

    with History(path_of(made)) as history:
        [gap] = history.about["gaps"]
    assert gap["why"] == "the disk did not answer in time"
    assert kept(path_of(made)) == (11, 10, 11)


# -- what goes


def test_the_oldest_runs_go_first_and_those_that_go_on_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    made = Histories(str(tmp_path / "h"), 1, "n")
    old = made.directory / file_name("g", "old", "n")
    made_by_an_agent(old)
    made.feed(batch(0, 1))
    made._write_all()

    assert not old.exists()
    assert f"the history {old} was deleted" in caplog.text
    assert path_of(made).exists()
    made.stop()


@pytest.mark.parametrize("name", ["optuna.sqlite", file_name("g", "old", "n")])
def test_what_is_certainly_no_history_neither_counts_nor_goes(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "h"
    folder.mkdir(mode=0o700)
    old = folder / file_name("g", "an older one", "n")
    made_by_an_agent(old)
    with contextlib.closing(sqlite3.connect(folder / name)) as theirs:
        theirs.execute("CREATE TABLE trials (value)")
        theirs.execute("INSERT INTO trials VALUES (zeroblob(10000000))")
        theirs.commit()

    directory.delete_oldest(folder, 2_000_000, ())
    assert sorted(folder.iterdir()) == sorted([folder / name, old])
    directory.delete_oldest(folder, 1, ())
    assert list(folder.iterdir()) == [folder / name]


@as_root
def test_a_history_of_another_user_is_not_deleted(tmp_path: Path) -> None:
    path = tmp_path / file_name("g", "r", "n")
    made_by_an_agent(path)
    os.chown(path, OTHER, OTHER)

    directory.delete_oldest(tmp_path, 1, ())

    assert path.exists()


# -- what another user has put there


@as_root
@pytest.mark.parametrize("trap", ["directory", "file", "link"])
def test_nothing_is_kept_where_another_user_has_a_hand_in_it(
    trap: str, made: Histories, tmp_path: Path
) -> None:
    made.directory.mkdir(mode=0o700)
    path, there = path_of(made), tmp_path / "there"
    if trap == "link":
        path.symlink_to(there)
    else:
        path.touch()
        os.chown(path if trap == "file" else made.directory, OTHER, OTHER)
    made.feed(batch(0, 10))
    made._write_all()

    assert made.describe()["problem"].startswith(("belongs to user", "is no file"))
    assert not there.exists()
    assert trap == "link" or path.stat().st_size == 0
    assert [each.name for each in made.directory.iterdir()] == [path.name]


# -- what goes wrong


def test_a_disk_that_hangs_is_said_while_it_hangs_and_does_not_hold_up_the_end(
    made: Histories, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answers = threading.Event(), threading.Event()

    def hang(run: KeptRun) -> None:
        asked.set()
        answers.wait()

    monkeypatch.setattr(module, "_HANGS_S", 0.0)
    # It waits so long for a disk that answers.
    monkeypatch.setattr(module, "_STOP_S", 60.0)
    monkeypatch.setattr(KeptRun, "open", hang)
    made.thread.keep_running()
    made.feed(batch(0, 1))
    made.feed_states({RUN: NOTHING})
    assert asked.wait(30)

    said = made.describe()
    assert said["problem"] == "the disk does not answer"
    assert said["since_ns"] > 0
    assert made.remark() == "no history is kept: the disk does not answer"
    began_s = time.monotonic()
    made.stop()
    assert time.monotonic() - began_s < 30
    answers.set()
    assert made.thread.join(30)


def test_a_file_system_without_locks_is_said_within_seconds(
    made: Histories, monkeypatch: pytest.MonkeyPatch
) -> None:
    # SQLite itself waits for five seconds.
    monkeypatch.setattr(run_file, "_BUSY_S", 0.0)
    made.directory.mkdir(mode=0o700)
    with contextlib.closing(sqlite3.connect(path_of(made))) as other:
        # SQLite takes the answer that there are no locks as one that another process has them.
        other.execute("BEGIN EXCLUSIVE")
        began_s = time.monotonic()
        made.feed(batch(0, 1))
        made._write_all()

        assert made.remark() == "no history is kept: database is locked"
        assert time.monotonic() - began_s < 5
