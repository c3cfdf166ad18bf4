"""Whether a process has ended, and what it answers: parents, silence, the kernel."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from make import Clock
from otel_ddp.agent.judge.answers import Answers
from otel_ddp.agent.judge.observe import ExitCauses, LocalHost
from otel_ddp.agent.reading.process import Process
from otel_ddp.diagnosis.stall.evidence import Kernel
from otel_ddp.journal import layout
from otel_ddp.journal.process_state import ended_by_parent
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.writer import JournalWriter
from otel_ddp.vocabulary.catalog import TRAINING_STEPS
from otel_ddp.vocabulary.words import PHASES, STATES


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


RUNNING, FINISHED, KILLED = (STATES[word] for word in ("running", "finished", "killed"))


def left_journal(
    folder: Path,
    facts: Mapping[str, Any],
    *,
    phase: str = "other",
    name: str = "",
    steps: int = 0,
    world: int | None = None,
) -> JournalReader:
    """The journal of a process that recorded no end, and stood there when it went."""
    identity = {"run": "r", "settled": True, "world_size": world}
    writer = JournalWriter(folder, 128 * 1024, identity)
    writer.document(layout.FACTS, facts)
    writer.phase(PHASES[phase], writer.name(name) if name else 0, 5)
    writer.state(STATES["running"], 6)
    if steps:
        writer.add(writer.counter(TRAINING_STEPS.name), steps)
    writer.close()
    return JournalReader(writer.path)


@pytest.mark.parametrize(
    ("parent_lives", "report", "expected"),
    [
        (True, {"signal": "SIGTERM"}, FINISHED),
        (True, {"signal": "SIGSEGV"}, KILLED),
        # The kernel reports nothing.
        (True, {}, KILLED),
        (False, {}, FINISHED),
    ],
)
def test_a_child_counts_as_running_until_it_is_known_how_it_has_ended(
    parent_lives: bool, report: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    causes, clock = FakeExitCauses(), Clock()
    parent = os.getpid() if parent_lives else 1 << 22
    reader = left_journal(tmp_path, {"parent": parent, "pool": False})
    child = Process(LocalHost(reader, causes, clock), lambda _: "n")
    child.life.gone_ns = 1

    def state_after(seconds: float, report: dict[str, Any]) -> int:
        clock.now += seconds
        causes.report = report
        child.poll(1, alive=False)
        return child.life.state

    assert (state_after(0.0, {}), child.ended_at) == (RUNNING, None)
    assert state_after(1.9, {}) == RUNNING
    assert state_after(0.2, report) == expected
    assert child.ended_at is not None
    assert state_after(9.0, {"signal": "SIGKILL"}) == expected
    causes.close()
    reader.close()


@pytest.mark.parametrize(
    ("report", "expected"), [({"exit_code": 0}, FINISHED), ({"exit_code": 1}, KILLED), ({}, KILLED)]
)
def test_a_rank_that_left_in_a_step_ended_well_if_the_kernel_says_so(
    report: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    causes = FakeExitCauses()
    causes.report = report
    with contextlib.closing(left_journal(tmp_path, {}, phase="forward")) as reader:
        rank = Process(LocalHost(reader, causes, Clock()), lambda _: "n")
        rank.poll(1, alive=False)
        assert rank.life.state == expected
    causes.close()


# -- which of those whose end nobody has recorded their parent has ended

WORKER: Mapping[str, Any] = {"parent": 1234, "pool": False}
POOLED: Mapping[str, Any] = {"parent": 1234, "pool": True}
SIGTERM = {"signal": "SIGTERM", "resident_bytes": 1}
LIVES, GONE = {"parent_lives": True}, {"parent_lives": False}


TERMINATED: Mapping[str, Any] = {"cause": SIGTERM}


@pytest.mark.parametrize(
    ("facts", "end", "more", "expected"),
    [
        # The kernel reports the signal that a parent sends.
        (WORKER, TERMINATED, {}, True),
        (WORKER, {"cause": {"exit_code": 0}}, {}, True),
        # It reports nothing of a worker of a pool; or of another child whose parent has ended too.
        *((POOLED, LIVES, {}, True), (WORKER, GONE, {}, True), (WORKER, LIVES, {}, False)),
        # Something else has ended it.
        (POOLED, {"cause": {"signal": "SIGKILL"}}, {}, False),
        (POOLED, {"cause": {**SIGTERM, "out_of_memory": "cgroup events"}}, {}, False),
        # A phase was under way.
        (WORKER, TERMINATED, {"phase": "forward"}, False),
        (WORKER, TERMINATED, {"name": "my own"}, False),
        # Of processes that train only a worker of a pool may be idle.
        *((POOLED, TERMINATED, {"steps": 3}, True), (WORKER, TERMINATED, {"steps": 3}, False)),
        # One of several ranks may have crashed if the signal is unknown.
        (WORKER, GONE, {"world": 2}, False),
    ],
)
def test_an_idle_worker_was_ended_by_its_parent_unless_something_else_ended_it(
    facts: Mapping[str, Any],
    end: Mapping[str, Any],
    more: Mapping[str, Any],
    expected: bool,
    tmp_path: Path,
) -> None:
    reader = left_journal(tmp_path, facts, **more)
    reader.read_definitions()

    assert ended_by_parent(reader, **end) is expected
    reader.close()


# -- one that goes on, and what it answers

# Closes what it has open, its journal's lock too, as a daemon does.
LEAVES = """
import os, sys
from pathlib import Path
from otel_ddp.journal.writer import JournalWriter
writer = JournalWriter(Path(sys.argv[1]), 128 * 1024, {"run": "r", "settled": True})
writer.state(1, 0)
os.closerange(3, 64)
print("there", flush=True)
sys.stdin.read()
"""


def test_a_process_that_leaves_its_journal_and_goes_on_is_not_dead(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVES, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (path,) = tmp_path.glob(f"*{layout.SUFFIX}")
        causes, reader = ExitCauses(), JournalReader(path)
        journal = Process(LocalHost(reader, causes), lambda _: "n")
        assert not reader.writer_is_alive()

        journal.poll(1, alive=False)
        while_it_lives = journal.life.state
        process.kill()
        process.wait()
        journal.poll(2, alive=False)

        assert (while_it_lives, journal.life.state) == (FINISHED, FINISHED)
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
def test_the_kernel_is_asked_about_the_thread_that_trains(tmp_path: Path) -> None:
    write_task(tmp_path, 7, "S")
    write_task(tmp_path, 8, "D")
    question_to = Answers(tmp_path / "x.journal", 7, 99, proc=tmp_path)
    question_to.ask("where", 1)
    threads = [{"main": True, "id": 7}, {"trains": True, "id": 8}]
    (tmp_path / "x.answer").write_text(json.dumps({"question": 99, "threads": threads}))
    kernel = question_to.poll(2).kernel

    assert kernel is not None
    assert kernel.state == "D"


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
    os.set_blocking(fifo, False)
    with contextlib.suppress(BlockingIOError):
        while os.write(fifo, bytes(1)):
            pass

    assert question_to.ask("where", 2_000_000_000)
    assert question_to.poll(5_000_000_000).silent_s == 4.0


@pytest.mark.usefixtures("fifo")
@pytest.mark.parametrize("content", ["[]", "[" * 100_000, '{"question": 9e400, "threads": 1}'])
def test_an_answer_of_odd_contents_is_none(tmp_path: Path, content: str) -> None:
    question_to = Answers(tmp_path / "x.journal", 1, 0)
    question_to.ask("where", 1)
    (tmp_path / "x.answer").write_text(content)
    assert not question_to.poll(2).answered
    numbers = '{"question": 99, "threads": [{"main": true, "frames": [[1], 2]}], "groups": [3]}'
    (tmp_path / "x.answer").write_text(numbers)
    assert question_to.poll(3).answered
