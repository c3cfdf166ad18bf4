"""Whether a process has ended, and what it answers: parents, silence, the kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_ddp.agent.reading.process import Process
from otel_ddp.agent.verdicts.answers import Answers
from otel_ddp.agent.verdicts.observe import ExitCauses, Here
from otel_ddp.diagnosis.stall.evidence import Kernel
from otel_ddp.journal import layout
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.writer import JournalWriter
from otel_ddp.vocabulary.words import PHASES, STATES

SIGTERM = {"signal": "SIGTERM"}


class FakeExitCauses(ExitCauses):
    """The kernel's report of an end, given by the test."""

    def __init__(self) -> None:
        super().__init__()
        self.report: dict[str, Any] = {}

    # The processes of these journals are all this one.
    def goes_on(self, pid: int, start_ticks: int) -> bool:
        return False

    def why(self, pid: int, start_ticks: int) -> dict[str, Any]:
        return {"resident_bytes": 1, **self.report}


class Bench:
    """Workers of one parent, some of which die."""

    def __init__(self, folder: Path) -> None:
        self.causes = FakeExitCauses()
        self.now = 100.0
        self.writers: list[JournalWriter] = []
        self.journals: list[Process] = []
        self.folder = folder

    def worker(self, pool: bool, parent: int = 1) -> Process:
        writer = JournalWriter(self.folder, 128 * 1024, {"run": "r", "settled": True})
        writer.document(layout.FACTS, {"parent": parent, "pool": pool})
        writer.phase(PHASES["other"], 0, 5)
        writer.state(STATES["running"], 6)
        reader = JournalReader(writer.path)
        journal = Process(Here(reader, self.causes, lambda: self.now), lambda who: "n")
        self.writers.append(writer)
        self.journals.append(journal)
        self.poll({})
        return journal

    def poll(self, report: dict[str, Any], *gone: Process, later_s: float = 0.0) -> list[float]:
        """One round of the agent's loop, so much later; the states of the dead workers."""
        self.now += later_s
        self.causes.report = report
        for each in self.journals:
            each.life.gone_ns = each.life.gone_ns or (1 if each in gone else 0)
            each.poll(1, each not in gone)
        return [each.life.state for each in gone]

    def close(self) -> None:
        self.causes.close()
        for writer, journal in zip(self.writers, self.journals, strict=True):
            journal.reader.close()
            writer.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


RUNNING, FINISHED, KILLED = ([STATES[word]] for word in ("running", "finished", "killed"))


@pytest.mark.parametrize("pool", [False, True])
def test_a_child_counts_as_running_until_the_kernel_has_reported_its_end(
    pool: bool, bench: Bench
) -> None:
    child = bench.worker(pool=pool)

    assert bench.poll({}, child) == RUNNING
    assert child.ended_at is None
    assert bench.poll(SIGTERM, child, later_s=1.9) == FINISHED
    assert child.ended_at is not None
    assert bench.poll({"signal": "SIGKILL"}, child, later_s=9.0) == FINISHED


@pytest.mark.parametrize("word", [{"signal": "SIGSEGV"}, {"exit_code": 3}, {"out_of_memory": "x"}])
def test_a_worker_that_died_is_killed_at_once(word: dict[str, Any], bench: Bench) -> None:
    worker = bench.worker(pool=True)

    assert bench.poll({}, worker) == RUNNING
    assert bench.poll(word, worker, later_s=0.1) == KILLED


@pytest.mark.parametrize(
    ("pool", "parent", "expected"),
    [(True, os.getpid(), FINISHED), (False, os.getpid(), KILLED), (False, 1 << 22, FINISHED)],
    ids=["of a pool", "its parent lives", "its parent has ended too"],
)
def test_without_the_kernels_report_a_pool_or_a_parent_that_ended_has_ended_its_worker(
    pool: bool, parent: int, expected: list[int], bench: Bench
) -> None:
    worker = bench.worker(pool=pool, parent=parent)

    assert bench.poll({}, worker) == RUNNING
    assert bench.poll({}, worker, later_s=1.9) == RUNNING
    assert bench.poll({}, worker, later_s=0.2) == expected


# Becomes another program; or closes what it has open, its journal's lock too, as a daemon does.
LEAVES = """
import os, sys
from pathlib import Path
from otel_ddp.journal.writer import JournalWriter
writer = JournalWriter(Path(sys.argv[1]), 128 * 1024, {"run": "r", "settled": True})
writer.state(1, 0)
if sys.argv[2] == "exec":
    code = "print('there', flush=True); input()"
    os.execv(sys.executable, [sys.executable, "-c", code])
os.closerange(3, 64)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["close", "exec"])
def test_a_process_that_leaves_its_journal_and_goes_on_is_not_dead(
    how: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", LEAVES, str(tmp_path), how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (path,) = tmp_path.glob(f"*{layout.SUFFIX}")
        causes, reader = ExitCauses(), JournalReader(path)
        journal = Process(Here(reader, causes), lambda _: "n")
        assert not reader.writer_is_alive()

        journal.poll(1, alive=False)
        while_it_lives = [journal.life.state]
        process.kill()
        process.wait()
        journal.poll(2, alive=False)

        assert (while_it_lives, [journal.life.state]) == (FINISHED, FINISHED)
    causes.close()
    reader.close()


def test_nothing_is_known_of_a_process_that_only_has_the_same_number(tmp_path: Path) -> None:
    mine = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    journal = tmp_path / "x.journal"

    assert Answers(journal, os.getpid(), mine).poll(1).kernel is not None
    assert Answers(journal, os.getpid(), mine + 1).poll(1).kernel is None
    assert Answers(journal, os.getpid(), 0).poll(1).kernel is None


def write_task(folder: Path, thread: int, state: str, ticks: int = 0) -> None:
    """What the kernel says of a thread of process 7, whose program has an odd name."""
    task = folder / "7" / "task" / str(thread)
    task.mkdir(parents=True, exist_ok=True)
    for path in (task / "stat", folder / "7" / "stat"):
        path.write_text(f"7 (a ) b) {state} {'0 ' * 10}{ticks} 0 {'0 ' * 6}99 0 0\n")


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[int]:
    """The end of a process that reads questions."""
    os.mkfifo(tmp_path / "x.ask")
    opened = os.open(tmp_path / "x.ask", os.O_RDWR)
    yield opened
    os.close(opened)


def test_states_and_time_are_read_whatever_the_program_is_called(tmp_path: Path) -> None:
    def write(main: int, helper: int, state: str) -> None:
        write_task(tmp_path, 7, state, main)
        write_task(tmp_path, 8, state, helper)

    question_to = Answers(tmp_path / "x.journal", 7, 99, proc=tmp_path)
    write(100, 100, "S")
    first = question_to.poll(1_000_000_000).kernel
    write(200, 101, "D")
    second = question_to.poll(3_000_000_000).kernel
    third = question_to.poll(4_000_000_000).kernel

    assert first == Kernel("S", False, None)
    assert second == Kernel("D", False, 100 / os.sysconf("SC_CLK_TCK") / 2)
    assert third == Kernel("D", True, 0.0)


@pytest.mark.usefixtures("fifo")
@pytest.mark.parametrize(("main", "seen"), [(7, "D"), (1, "S")])
def test_the_kernel_is_asked_about_the_thread_that_trains(
    tmp_path: Path, main: int, seen: str
) -> None:
    write_task(tmp_path, 7, "S")
    write_task(tmp_path, 8, "D")
    question_to = Answers(tmp_path / "x.journal", 7, 99, proc=tmp_path)
    question_to.ask("where", 1)
    threads = [{"main": True, "id": main}, {"trains": True, "id": 8}]
    (tmp_path / "x.answer").write_text(json.dumps({"question": 99, "threads": threads}))
    kernel = question_to.poll(2).kernel

    # In a PID namespace of its own the numbers of its threads are not ours.
    assert kernel is not None
    assert kernel.state == seen


def test_a_process_that_cannot_be_asked_differs_from_one_that_does_not_answer(
    tmp_path: Path,
) -> None:
    question_to = Answers(tmp_path / "x.journal", 1, 0)
    assert not question_to.ask("where", 1)
    os.mkfifo(tmp_path / "x.ask")
    assert not question_to.ask("where", 1)
    assert question_to.poll(2).silent_s is None


def test_however_often_a_process_is_asked_the_agent_does_not_wait_for_room(
    tmp_path: Path, fifo: int
) -> None:
    question_to = Answers(tmp_path / "x.journal", 1, 0)
    assert question_to.ask("where", 1_000_000_000)
    while question_to.ask("where", 2_000_000_000) and _unread(fifo) < 60_000:
        pass
    assert question_to.poll(5_000_000_000).silent_s == 4.0


def _unread(fd: int) -> int:
    import array
    import fcntl
    import termios

    found = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, found)
    return found[0]


@pytest.mark.usefixtures("fifo")
@pytest.mark.parametrize(
    "content", ["[]", '{"question": "x"}', "[" * 100_000, '{"question": 9e400, "threads": 1}']
)
def test_an_answer_of_odd_contents_is_none(tmp_path: Path, content: str) -> None:
    question_to = Answers(tmp_path / "x.journal", 1, 0)
    question_to.ask("where", 1)
    (tmp_path / "x.answer").write_text(content)
    assert not question_to.poll(2).answered
    numbers = '{"question": 99, "threads": [{"main": true, "frames": [[1], 2]}], "groups": [3]}'
    (tmp_path / "x.answer").write_text(numbers)
    assert question_to.poll(3).answered
