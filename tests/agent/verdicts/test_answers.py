"""What is known of a process that was asked where it is: its answer, its silence, the kernel."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_ddp.agent.verdicts.answers import Answers
from otel_ddp.diagnosis.stall.evidence import Kernel


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
