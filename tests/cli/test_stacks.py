"""otel-ddp stacks: the stacks of ranks that answer, and advice for those that do not."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from node import Node, until
from otel_ddp.agent.judge import answers
from otel_ddp.cli import main
from otel_ddp.journal.reader import JournalReader

# Two ranks that answer, one that cannot, and one that has no thread for it; torch is imported once.
TRAIN = """
import ctypes, os
import otel_ddp
from otel_ddp.torch import stack_answers

held, holds = os.pipe()
for rank in (3, 2, 1, 0):
    if rank == 0 or os.fork() == 0:
        break
run = otel_ddp.init(run="one", global_rank=rank, world_size=4, local_rank=rank)
if rank != 3:
    stack_answers.start(run._records.recorder.writer.path, int, lambda: None)


def holds_the_lock():
    print("there", flush=True)
    ctypes.PyDLL(None).read(held, ctypes.create_string_buffer(1), 1)


def waits_for_a_batch():
    print("there", flush=True)
    os.read(held, 1)


holds_the_lock() if rank == 2 else waits_for_a_batch()
"""


@pytest.fixture(scope="module")
def place() -> Iterator[str]:
    with Node(OTEL_DDP_AGENT="off") as node:
        stdout = node.python(TRAIN).stdout
        assert stdout is not None
        assert len([*islice(filter("there\n".__eq__, stdout), 4)]) == 4
        place = str(node.place.directory)
        pids = [pid_of(place, rank) for rank in range(4)]
        until(lambda: [*map(state_of, pids)] == ["S"] * 4, "the wait of each")
        yield place


def state_of(pid: int) -> str:
    """By the kernel, of its main thread."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]


def pid_of(place: str, rank: int) -> int:
    for path in Path(place).glob("*.journal"):
        reader = JournalReader(path)
        found, pid = reader.identity.get("global_rank"), reader.pid
        reader.close()
        if found == rank:
            return pid
    raise AssertionError(rank)


def test_the_stacks_of_the_chosen_ranks_are_shown(
    place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "ANSWER_S", 60.0)
    assert main(["stacks", "--dir", place, "--rank", "0", "--rank", "1"]) == 0
    printed = capsys.readouterr().out.splitlines()
    heads = [line for line in printed if line.startswith("rank ")]
    assert heads == [f"rank {rank}, run one, pid {pid_of(place, rank)}" for rank in (0, 1)]
    assert printed.count("  thread MainThread") == 2
    assert sum(line.startswith("    waits_for_a_batch (<string>:") for line in printed) == 2

    assert main(["stacks", "--dir", place, "--rank", "7"]) == 1
    assert capsys.readouterr().out == "no such rank runs on this node\n"


def test_each_rank_that_does_not_answer_is_shown_with_the_reason_and_advice(
    place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One of them does.
    monkeypatch.setattr(answers, "ANSWER_S", 10.0)
    pid = pid_of(place, 1)
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: state_of(pid) == "T", "the stop")
        assert main(["stacks", "--dir", place]) == 1
    finally:
        os.kill(pid, signal.SIGCONT)

    _, rank_0, rank_1, rank_2, rank_3 = capsys.readouterr().out.split("rank ")
    assert "waits_for_a_batch" in rank_0
    assert rank_1.startswith(f"1, run one, pid {pid}: stopped by a signal\n")
    assert "it cannot answer: it is stopped by a signal" in rank_1
    assert "C code holds Python's lock (the GIL)" in rank_2
    assert f"`py-spy dump --nonblocking --pid {pid_of(place, 2)}`" in rank_2
    assert "it does not answer: it has not called" in rank_3


def test_dead_processes_are_not_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tmp_path.chmod(0o700)

    assert main(["stacks", "--dir", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "no rank runs on this node\n"
