"""What wakes the agent, which journals it reads where files run short, and its log."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_ddp import settings
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.reading.journals import Journals
from otel_ddp.agent.service import Agent, lock_place, wait
from otel_ddp.journal import layout
from otel_ddp.journal.place import Place
from otel_ddp.journal.writer import JournalWriter
from shortages import descriptors_below

# select() takes no number above 1023.
HIGH = 1500


@pytest.fixture
def files() -> int:
    """How many may be open: at least half of them are free, whatever the tests before left."""
    return 100 + 2 * max(int(each) for each in os.listdir("/proc/self/fd"))


@pytest.fixture
def pipes() -> Iterator[tuple[int, int, int, int]]:
    """Two ends to read from, and then the two to write to."""
    (doorbell, ring), (handle, die) = os.pipe(), os.pipe()
    yield doorbell, handle, ring, die
    for each in (doorbell, handle, ring, die):
        os.close(each)


@pytest.mark.parametrize("by", ["doorbell", "death"])
def test_numbers_above_1023_wake_the_agent(
    by: str, pipes: tuple[int, int, int, int], files: int
) -> None:
    low_doorbell, low_handle, ring, die = pipes
    began_s = time.monotonic()
    with descriptors_below(HIGH + files), contextlib.ExitStack() as opened:
        doorbell, handle = (
            fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, HIGH) for each in (low_doorbell, low_handle)
        )
        opened.callback(os.close, doorbell)
        opened.callback(os.close, handle)
        os.write(ring if by == "doorbell" else die, b"!!")

        wait(doorbell, [handle], tick_s=600.0)

    assert time.monotonic() - began_s < 300.0
    # One ring wakes the agent once.
    os.set_blocking(low_doorbell, False)
    with pytest.raises(BlockingIOError):
        os.read(low_doorbell, 1)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    (tmp_path / "place").mkdir()
    return Place(tmp_path / "place")


def test_an_agent_that_is_stopped_waits_for_the_ends_of_runs_on_several_nodes(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = lock_place(place)
    assert lock is not None
    agent = Agent(place, settings.read(directory=str(place.directory)), lock)
    at_work = iter([True, True, False])
    monkeypatch.setattr(agent._watch.links, "any_at_work", lambda _: next(at_work))
    monkeypatch.setattr(agent, "_stop_at_signals", lambda: setattr(agent, "_stop_reason", "signal"))

    agent.run()

    os.close(agent._doorbell)
    os.close(lock)
    assert list(at_work) == []


def dead_journal(folder: Path) -> Path:
    """The journal of a process that has ended."""
    writer = JournalWriter(folder, 128 * 1024, {"run": "r"})
    writer.close()
    return writer.path


def delete_done(journals: Journals) -> None:
    done = journals.done()
    journals.close(done)
    journals.delete(done)


@pytest.fixture
def journals(tmp_path: Path, place: Place) -> Iterator[Journals]:
    made = Journals(place, Ledger(), "n")
    yield made
    made.poll()
    made.commit(made.marks())
    delete_done(made)
    made.poll()
    assert not made.marks()


@contextlib.contextmanager
def two_left_of(files: int) -> Iterator[None]:
    """As where many scrape at once."""
    others = []
    with descriptors_below(files):
        with contextlib.suppress(OSError):
            while True:
                others.append(os.dup(0))
        # The directory of a journal is opened before it.
        os.close(others.pop())
        os.close(others.pop())
        try:
            yield
        finally:
            for each in others:
                os.close(each)


def test_a_journal_for_which_no_file_was_left_is_read_later(
    place: Place, journals: Journals, files: int, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = sorted(dead_journal(place.directory) for _ in range(2))

    with two_left_of(files):
        journals.find()
        journals.find()

        assert list(journals.marks()) == [first]
        (unread,) = journals.unreadable()
    assert unread == f"{second}: Too many open files"
    (said,) = [each.message for each in caplog.records]
    assert said == f"{unread}; it is tried again until it can be read"
    journals.find()
    assert list(journals.marks()) == [first, second]
    assert journals.unreadable() == []


def test_a_file_that_is_no_journal_is_logged_once_and_listed_until_it_is_deleted(
    place: Place, journals: Journals, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = dead_journal(tmp_path)
    bad, link = place.directory / "1.journal", place.directory / "2.journal"
    bad.write_bytes(b"no")
    link.symlink_to(journal)

    journals.find()
    journals.find()

    told = [f"{bad} is not a journal", f"{link}: Too many levels of symbolic links"]
    assert journals.unreadable() == told
    assert [each.message.partition(";")[0] for each in caplog.records] == told
    bad.unlink()
    journal.replace(link)
    journals.find()
    assert (list(journals.marks()), journals.unreadable()) == ([link], [])


def test_a_journal_stays_until_the_span_of_its_run_was_fetched(place: Place) -> None:
    ledger = Ledger()
    ledger.keep_history = True
    journals = Journals(place, ledger, "n")
    told = {"run": "r", "exported": True, "settled": True}
    writer = JournalWriter(place.directory, 128 * 1024, told)
    writer.document(layout.FACTS, {"span": {"id": "5a" * 8, "trace": f"id/{'4f' * 16}"}})
    writer.close()
    journals.find()
    journals.poll()
    journals.commit(journals.marks())
    assert journals.done() == []

    ((_, _, (span,)),) = journals.flush_documents()

    assert span.content["name"] == "run"
    assert journals.done() == [writer.path]
    delete_done(journals)


LOGS = r"""
import logging
from otel_ddp.agent import service
service.log_to_stderr()
logging.getLogger("otel_ddp.agent").warning("%s is damaged", "a\x1b[31m\nb\udcff")
"""


def test_no_text_of_a_journal_controls_the_terminal_that_shows_the_log() -> None:
    logged = subprocess.run(
        [sys.executable, "-c", LOGS], capture_output=True, text=True, check=True, timeout=300
    )

    assert logged.stderr.endswith(r" otel-ddp agent: a\x1b[31m\nb\udcff is damaged" + "\n")
