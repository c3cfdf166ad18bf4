"""otel-ddp stacks: the stacks of ranks that answer, and advice for those that do not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from node import Node, until
from otel_ddp.cli import main
from otel_ddp.journal.reader import JournalReader

# Two ranks of a run, and one process that does not answer; torch is imported once.
TRAIN = """
import ctypes, os, sys
import otel_ddp
from otel_ddp.torch import stack_answers

held, holds = os.pipe()
for rank in (1, 0):
    if rank == 0 or os.fork() == 0:
        break
run = otel_ddp.init(run="one", global_rank=rank, world_size=2, local_rank=rank)
if rank == 1 or os.environ["BOTH"]:
    stack_answers.start(run._records.recorder.writer.path, int, lambda: None)


def holds_the_lock():
    ctypes.PyDLL(None).read(held, ctypes.create_string_buffer(1), 1)


def waits_for_a_batch():
    os.read(held, 1)


holds_the_lock() if rank == 1 and os.environ["HOLD"] else waits_for_a_batch()
"""


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with Node(OTEL_DDP_AGENT="off") as found:
        yield found


def two(node: Node, name: str, both: str = "1", hold: str = "") -> str:
    """Two ranks that hang; their directory."""
    place = node.root / name
    node.python(TRAIN, OTEL_DDP_DIR=str(place), BOTH=both, HOLD=hold)
    asks = 2 if both else 1
    until(lambda: len([*place.glob("*.ask")]) == asks, "the threads that answer")
    until(lambda: len([*place.glob("[0-9]*.journal")]) == 2, "the journals")
    return str(place)


def pid_of(place: str, rank: int) -> int:
    for path in Path(place).glob("*.journal"):
        reader = JournalReader(path)
        found, pid = reader.identity.get("global_rank"), reader.pid
        reader.close()
        if found == rank:
            return pid
    raise AssertionError(rank)


def test_the_stacks_of_every_rank_or_of_the_chosen_one_are_shown(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    place = two(node, "all")

    assert main(["stacks", "--dir", place]) == 0
    printed = capsys.readouterr().out.splitlines()
    heads = [line for line in printed if line.startswith("rank ")]
    assert heads == [f"rank {rank}, run one, pid {pid_of(place, rank)}" for rank in (0, 1)]
    assert printed.count("  thread MainThread") == 2
    assert sum(line.startswith("    waits_for_a_batch (<string>:") for line in printed) == 2

    assert main(["stacks", "--dir", place, "--rank", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line[:6] for line in printed if line.startswith("rank ")] == ["rank 1"]

    assert main(["stacks", "--dir", place, "--rank", "7"]) == 1
    assert capsys.readouterr().out == "no such rank runs on this node\n"


def test_a_process_that_does_not_answer_is_shown_with_the_reason_and_advice(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    place = two(node, "silent", both="", hold="1")

    assert main(["stacks", "--dir", place]) == 1

    zero, one = capsys.readouterr().out.split("rank 1, ")
    assert "it does not answer: it has not called" in zero
    assert "C code holds Python's lock (the GIL)" in one
    assert f"`py-spy dump --nonblocking --pid {pid_of(place, 1)}`" in one


def test_a_stopped_process_is_shown_as_stopped(
    node: Node, capsys: pytest.CaptureFixture[str]
) -> None:
    place = two(node, "stopped")
    pid = pid_of(place, 0)
    os.kill(pid, signal.SIGSTOP)
    try:
        status = Path(f"/proc/{pid}/status")
        until(lambda: "State:\tT" in status.read_text(), "the stop")
        assert main(["stacks", "--dir", place, "--rank", "0"]) == 1
    finally:
        os.kill(pid, signal.SIGCONT)

    assert "it cannot answer: it is stopped by a signal" in capsys.readouterr().out


def test_dead_processes_are_not_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o700)

    assert main(["stacks", "--dir", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "no rank runs on this node\n"
