"""Two real ranks that hang for real: their witnesses, the probe and the verdict, together."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node import Node, until
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.verdicts.answers import Answers
from otel_ddp.agent.verdicts.journal_source import JournalSources
from otel_ddp.agent.verdicts.observe import ExitCauses
from otel_ddp.agent.verdicts.source import Source
from otel_ddp.diagnosis.detector import Observation
from otel_ddp.diagnosis.stall.detector import Stalls
from otel_ddp.diagnosis.stall.evidence import Kernel, Position
from otel_ddp.diagnosis.verdict import Change, Verdict
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import JournalReader

FLOOR_S = 2.0

# Torch is imported once: each pair of ranks is forked from there.
PARENT = """
import os, sys
import torch
import torch.distributed, torch.nn.parallel

# The first step of the first optimizer imports the compiler.
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
for line in sys.stdin:
    how, port, place, script = line.split()
    for rank in (0, 1):
        pid = os.fork()
        if pid == 0:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port, OTEL_DDP_DIR=place, OTEL_DDP_RUN=how,
            )
            code = compile(open(script).read(), script, "exec")
            exec(code, {"how": how, "__name__": "__main__"})
            os._exit(0)
"""

TRAIN = """
import os, threading, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

dist.init_process_group("gloo")
rank = dist.get_rank()
other = dist.new_group([0, 1])
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = otel_ddp.instrument(model)


def batches():
    number = 0
    while True:
        number += 1
        if rank == 1 and number == 5:
            hang_in_data()
        yield torch.ones(2, 4)


def hang_in_data():
    if how == "thread":
        time.sleep(1000)
    if how == "leaves":
        threading.Thread(target=uploads, name="uploader").start()
        raise ValueError("a bad sample")


def uploads():
    time.sleep(1000)


def user_collectives(number):
    value = torch.ones(3)
    if number != 4 or how not in ("skips", "differs"):
        dist.all_reduce(value)
    elif rank == 0:
        dist.all_reduce(value)
    elif how == "differs":
        dist.broadcast(value, src=0)
    else:
        dist.barrier(group=other)


def train():
    for number, batch in enumerate(otel_ddp.data(batches())):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number < 4 or how in ("skips", "differs"):
            user_collectives(number)
        if number == 4 and how == "moves":
            # Without a sign that any hook sees.
            with run.phase("evaluation of mine"):
                while True:
                    dist.all_reduce(torch.ones(1), group=other)
                    time.sleep(0.01)


if how == "thread":
    trains = threading.Thread(target=train)
    trains.start()
    trains.join()
else:
    train()
"""


class Job:
    """Two ranks that train until they hang, and the detector that watches them."""

    def __init__(self, place: Place) -> None:
        self.journals = [
            JournalFeed(JournalReader(path), Ledger(), lambda _: "here")
            for path in place.journals()
        ]
        self.causes = ExitCauses()
        self.sources = JournalSources(self.causes)
        self.stalls = Stalls(FLOOR_S)
        self.told: list[Change] = []
        self.questions: list[str] = []
        # Since when both are in a phase that the program has named.
        self.named_since_s: float | None = None
        self.origin_ns = time.time_ns() - time.monotonic_ns()
        until(lambda: len(self.positions()) == 2, "two positions")

    def positions(self) -> dict[Source, Position]:
        """Where each rank is by now."""
        for each in self.journals:
            each.poll(time.time_ns(), each.reader.writer_is_alive())
        found = {each: each.position(self.origin_ns) for each in self.sources.of(self.journals)}
        return {each: position for each, position in found.items() if position is not None}

    def poll(self) -> None:
        """One look of the agent."""
        positions, now_ns = self.positions(), time.time_ns()
        if self.named_since_s is None and all(each.name for each in positions.values()):
            self.named_since_s = time.monotonic()
        for source, position in positions.items():
            evidence = source.evidence(now_ns)
            seen = Observation(now_ns, position=position, evidence=evidence)
            self.stalls.feed(source.state()._replace(world_size=2), seen)
        self.told += self.stalls.poll(now_ns)
        for source in positions:
            question = self.stalls.questions.get(source.labels)
            if question is not None:
                self.questions.append(question)
                source.ask(question, now_ns)

    def has_moved_for(self, seconds: float) -> bool:
        since_s = self.named_since_s
        return since_s is not None and time.monotonic() - since_s >= seconds

    @property
    def verdict(self) -> Verdict:
        """The first one."""
        assert self.told[0].opened
        return self.told[0].verdict

    def close(self) -> None:
        for each in self.journals:
            os.kill(each.pid, signal.SIGKILL)
            each.reader.close()
        self.causes.close()


HANGS = ("thread", "leaves", "skips", "differs")


@pytest.fixture(scope="module")
def jobs() -> Iterator[dict[str, Job]]:
    """A pair of ranks for each way to hang, all at once, until each has a verdict."""
    with Node(OTEL_DDP_AGENT="off") as node, contextlib.ExitStack() as ports:
        script = node.root / "train.py"
        script.write_text(TRAIN)
        parent = node.python(PARENT)
        assert parent.stdin is not None
        places = {how: Place(node.root / how) for how in (*HANGS, "moves")}
        for how, place in places.items():
            free = ports.enter_context(socket.socket())
            free.bind(("127.0.0.1", 0))
            parent.stdin.write(f"{how} {free.getsockname()[1]} {place.directory} {script}\n")
        ports.close()
        parent.stdin.flush()
        until(lambda: all(len(place.journals()) == 2 for place in places.values()), "journals")
        found = {how: Job(place) for how, place in places.items()}

        def told() -> bool:
            for job in found.values():
                job.poll()
            hung = all(found[how].told for how in HANGS)
            return hung and found["moves"].has_moved_for(2 * FLOOR_S)

        until(told, "the verdicts")
        yield found
        for job in found.values():
            job.close()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("thread", "(hang_in_data) and sleeps"),
        ("leaves", "has left its program after step 4, at its end or by an exception, and waits "),
    ],
)
def test_of_a_main_thread_that_only_waits_the_training_thread_is_named(
    jobs: dict[str, Job], how: str, words: str
) -> None:
    verdict = jobs[how].verdict

    assert (verdict.evidence["cause"], verdict.evidence["culprits"]) == ("not_reached", ["1"])
    assert words in verdict.sentence


def test_ranks_that_wait_in_different_process_groups_wait_for_each_other(
    jobs: dict[str, Job],
) -> None:
    verdict = jobs["skips"].verdict

    # Each has entered one that the other has not: in another process group.
    assert verdict.evidence["cause"] == "crossed"
    assert verdict.evidence["culprits"] == ["0", "1"]
    assert "the order of their collectives" in verdict.sentence


def test_ranks_that_enter_different_collectives_are_named_with_them(
    jobs: dict[str, Job],
) -> None:
    verdict = jobs["differs"].verdict

    assert verdict.evidence["cause"] == "different_collectives"
    assert "rank 0 entered all_reduce [[3]]; rank 1 entered broadcast [[3]]" in verdict.sentence


def test_a_loop_of_collectives_that_no_hook_sees_is_no_stall(jobs: dict[str, Job]) -> None:
    assert jobs["moves"].told == []
    assert "where" in jobs["moves"].questions


# -- without ranks


def test_nothing_is_known_of_a_process_that_only_has_the_same_number(tmp_path: Path) -> None:
    mine = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    journal = tmp_path / "x.journal"

    assert Answers(journal, os.getpid(), mine).poll(1).kernel is not None
    assert Answers(journal, os.getpid(), mine + 1).poll(1).kernel is None
    assert Answers(journal, os.getpid(), 0).poll(1).kernel is None


def test_states_and_time_are_read_whatever_the_program_is_called(tmp_path: Path) -> None:
    def write(main: int, helper: int, state: str) -> None:
        for thread, ticks in (("7", main), ("8", helper)):
            folder = tmp_path / "7" / "task" / thread
            folder.mkdir(parents=True, exist_ok=True)
            for path in (folder / "stat", tmp_path / "7" / "stat"):
                path.write_text(f"7 (a ) b) {state} {'0 ' * 10}{ticks} 0 {'0 ' * 6}99 0 0\n")

    question_to = Answers(tmp_path / "x.journal", 7, 99, proc=tmp_path)
    write(100, 100, "S")
    first = question_to.poll(1_000_000_000).kernel
    write(200, 101, "D")
    second = question_to.poll(3_000_000_000).kernel
    third = question_to.poll(4_000_000_000).kernel

    assert first == Kernel("S", False, None)
    assert second == Kernel("D", False, 100 / os.sysconf("SC_CLK_TCK") / 2)
    assert third == Kernel("D", True, 0.0)


@pytest.mark.parametrize(("main", "seen"), [(7, "D"), (1, "S")])
def test_the_kernel_is_asked_about_the_thread_that_trains(
    tmp_path: Path, main: int, seen: str
) -> None:
    for thread, state in (("7", "S"), ("8", "D")):
        folder = tmp_path / "7" / "task" / thread
        folder.mkdir(parents=True)
        for path in (folder / "stat", tmp_path / "7" / "stat"):
            path.write_text(f"7 (a) {state} {'0 ' * 10}0 0 {'0 ' * 6}99 0 0\n")
    journal, fifo = tmp_path / "x.journal", tmp_path / "x.ask"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR)
    try:
        question_to = Answers(journal, 7, 99, proc=tmp_path)
        question_to.ask("where", 1)
        threads = [{"main": True, "id": main}, {"trains": True, "id": 8}]
        (tmp_path / "x.answer").write_text(json.dumps({"question": 99, "threads": threads}))
        kernel = question_to.poll(2).kernel
    finally:
        os.close(reader)

    # In a PID namespace of its own the numbers of its threads are not ours.
    assert kernel is not None
    assert kernel.state == seen


def test_a_process_that_cannot_be_asked_differs_from_one_that_does_not_answer(
    tmp_path: Path,
) -> None:
    journal, fifo = tmp_path / "x.journal", tmp_path / "x.ask"
    question_to = Answers(journal, 1, 0)
    assert not question_to.ask("where", 1)
    os.mkfifo(fifo)
    assert not question_to.ask("where", 1)
    assert question_to.poll(2).silent_s is None

    reader = os.open(fifo, os.O_RDWR)
    try:
        assert question_to.ask("where", 1_000_000_000)
        # However often it is asked, the agent does not wait for room.
        while question_to.ask("where", 2_000_000_000) and _unread(reader) < 60_000:
            pass
        assert question_to.poll(5_000_000_000).silent_s == 4.0
    finally:
        os.close(reader)


def _unread(fd: int) -> int:
    import array
    import fcntl
    import termios

    found = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, found)
    return found[0]


@pytest.mark.parametrize(
    "content",
    ["[]", '{"question": "x"}', "[" * 100_000, '{"question": 9e400, "threads": 1}'],
)
def test_an_answer_of_odd_contents_is_none(tmp_path: Path, content: str) -> None:
    journal, fifo = tmp_path / "x.journal", tmp_path / "x.ask"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDWR)
    try:
        question_to = Answers(journal, 1, 0)
        question_to.ask("where", 1)
        (tmp_path / "x.answer").write_text(content)
        assert not question_to.poll(2).answered
        numbers = '{"question": 99, "threads": [{"main": true, "frames": [[1], 2]}], "groups": [3]}'
        (tmp_path / "x.answer").write_text(numbers)
        assert question_to.poll(3).answered
    finally:
        os.close(reader)
