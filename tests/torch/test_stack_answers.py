"""The thread that answers questions about stacks: no exit and no fork waits for it."""

from __future__ import annotations

import gc
import json
import os
import signal
import stat
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import warm
from conftest import threads
from node import until
from otel_ddp import errors
from otel_ddp.recording.progress import DevicePosition
from otel_ddp.torch import collectives, stack_answers


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "1-00000000.journal"
    stack_answers.start(path, int, lambda: None)
    yield path
    stack_answers.stop()


def ask(journal: Path, question: str) -> None:
    fd = os.open(journal.with_suffix(".ask"), os.O_WRONLY | os.O_NONBLOCK)
    try:
        os.write(fd, question.encode())
    finally:
        os.close(fd)


def answer(journal: Path, number: int) -> dict[str, Any]:
    path = journal.with_suffix(".answer")

    def there() -> Any:
        said = json.loads(path.read_text()) if path.exists() else {}
        return said if said.get("question") == number else None

    return dict(until(there, "an answer"))


@contextmanager
def waiting(*names: str, levels: int = 0) -> Iterator[dict[str, threading.Thread]]:
    """Threads of these names that wait, so many calls below their first one."""
    held = threading.Event()

    def helper_waits(levels: int) -> None:
        held.wait() if levels == 0 else helper_waits(levels - 1)

    threads = {
        name: threading.Thread(target=helper_waits, args=(levels,), name=name) for name in names
    }
    for each in threads.values():
        each.start()
    try:
        yield threads
    finally:
        held.set()
        for each in threads.values():
            each.join()


def test_an_answer_has_all_stacks_the_main_threads_first_and_the_training_threads_second(
    tmp_path: Path,
) -> None:
    journal, training = tmp_path / "1-00000000.journal", 0
    stack_answers.start(journal, lambda: training, lambda: None)
    with waiting("trains", "uploads") as helpers:
        ask(journal, "1 where\n")
        before = answer(journal, 1)["threads"]
        training = helpers["trains"].ident or 0
        ask(journal, "7 where\n")
        said = answer(journal, 7)
    stack_answers.stop()

    assert not any(each["trains"] for each in before)
    assert [each["name"] for each in said["threads"] if each["trains"]] == ["trains"]
    main, trains, *others = said["threads"]
    assert (main["main"], main["name"], trains["name"]) == (True, "MainThread", "trains")
    assert "uploads" in [each["name"] for each in others]
    assert __file__ in [file for file, _, _ in main["frames"]]
    assert trains["frames"][0][0] == threading.__file__
    assert "helper_waits" in [function for _, _, function in trains["frames"]]
    # The thread that answers is not in the answer.
    files = {file for each in said["threads"] for file, _, _ in each["frames"]}
    assert stack_answers.__file__ not in files


def test_its_files_are_for_this_user_alone_and_are_removed_at_the_end(journal: Path) -> None:
    ask(journal, "1 where\n")
    answer(journal, 1)
    files = [journal.with_suffix(".ask"), journal.with_suffix(".answer")]
    assert [stat.S_IMODE(each.stat().st_mode) for each in files] == [0o600, 0o600]

    stack_answers.stop()

    assert not [each for each in files if each.exists()]
    assert stack_answers._current is None


def test_several_questions_get_one_answer_with_the_most_that_was_asked(journal: Path) -> None:
    ask(journal, "no question\n\n1 where\n2 what\n3 where\n")

    said = answer(journal, 3)

    assert (said["kind"], said["collectives"]) == ("what", [])


def test_an_answer_is_bounded_whatever_the_threads_do(journal: Path) -> None:
    with waiting(*map(str, range(70)), levels=100):
        ask(journal, "1 where\n")
        threads = answer(journal, 1)["threads"]

    assert len(threads) == 64
    assert max(len(each["frames"]) for each in threads) == 64


class Tensor:
    """Stands for what a frame holds."""


def test_an_answer_keeps_nothing_of_the_frames_alive(journal: Path) -> None:
    def ask_from_a_frame_that_holds() -> weakref.ref[Tensor]:
        tensor = Tensor()
        ask(journal, "1 where\n")
        answer(journal, 1)
        return weakref.ref(tensor)

    gc.disable()
    try:
        assert ask_from_a_frame_that_holds()() is None
    finally:
        gc.enable()


@pytest.fixture
def taken(journal: Path, tmp_path: Path) -> Iterator[int]:
    """The number of its fifo, which was closed and is now that of the user's pipe."""
    waiting = stack_answers._current
    assert waiting is not None
    ours, user = waiting._fd, os.pipe()
    calls = Path("/proc/self/task")
    # It waits in its read: the first argument of that call is the number.
    until(
        lambda: any(f" {ours:#x} " in each.read_text() for each in calls.glob("*/syscall")),
        "the thread to be waiting",
    )
    os.dup2(user[0], ours)
    os.write(user[1], b"the user's")
    yield ours
    for each in (ours, *user):
        os.close(each)


@pytest.mark.parametrize("then", ["stop", "a question"])
def test_a_descriptor_that_is_the_users_by_now_is_left_alone(
    journal: Path, taken: int, then: str
) -> None:
    waiting = stack_answers._current
    assert waiting is not None

    stack_answers.stop() if then == "stop" else ask(journal, "1 where\n")
    assert waiting._ended.wait(60)

    assert then != "a question" or answer(journal, 1)["threads"]
    assert then != "stop" or os.get_blocking(taken)
    assert os.read(taken, 100) == b"the user's"


def test_where_no_fifo_can_be_made_training_goes_on(tmp_path: Path) -> None:
    stack_answers.start(tmp_path / "missing" / "1-0.journal", int, lambda: None)

    assert stack_answers._current is None
    assert errors.failures == {}


NCCL_TRACE = {
    "entries": [
        {
            "process_group": ["0", "default_pg"],
            "collective_seq_id": 7,
            "is_p2p": False,
            "profiling_name": "nccl:all_reduce",
            "input_sizes": [[1000]],
            "state": state,
        }
        for state in ("scheduled", "started")
    ]
}


def test_what_is_under_way_on_a_device_is_told_with_its_state_and_where_the_device_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collectives, "world", object)
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_fr_trace_json", raising=False)
    monkeypatch.setattr(
        *(torch._C._distributed_c10d, "_dump_nccl_trace_json"),
        *(lambda **_: json.dumps(NCCL_TRACE).encode(),),
        raising=False,
    )
    path = tmp_path / "1-00000000.journal"
    stack_answers.start(path, int, lambda: DevicePosition(3, 17))
    try:
        ask(path, "1 what\n")
        said = answer(path, 1)
    finally:
        stack_answers.stop()

    assert [(each["number"], each["state"]) for each in said["collectives"]] == [
        (7, "scheduled"),
        (7, "started"),
    ]
    assert said["device"] == {"phase": 3, "step": 17}


def test_of_many_collectives_under_way_on_a_device_the_first_ones_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first is the one that hangs, and hosts run ahead by hundreds."""
    (entry, _) = NCCL_TRACE["entries"]
    trace = {"entries": [{**entry, "collective_seq_id": number} for number in range(7, 400)]}
    # The same group has collectives of the hosts, too.
    hosts = {"entries": [{**entry, "profiling_name": "gloo:barrier"}] * 30}
    c10d = torch._C._distributed_c10d
    monkeypatch.setattr(collectives, "world", object)
    for name, content in (("_dump_nccl_trace_json", trace), ("_dump_fr_trace_json", hosts)):
        text = json.dumps(content)
        monkeypatch.setattr(c10d, name, lambda text=text, **_: text, raising=False)

    recorded = collectives.flight_recorders(with_collectives=True)
    latest = collectives.latest(recorded)
    found = [each["number"] for each in latest if each["op"] == "nccl:all_reduce"]
    assert found == list(range(7, 27))


# -- as a process of its own

# Torch is imported once; each process is forked from there, and ends as any other.
PARENT = """
import json, os, sys
from otel_ddp.torch import stack_answers

for line in sys.stdin:
    folder, code = json.loads(line)
    pid = os.fork()
    if pid == 0:
        for fd, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT), fd)
        sys.argv[1:] = [os.path.join(folder, "1-00000000.journal")]
        exec(compile(code, "program", "exec"))
        break
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
BEGIN = """
import atexit, os, signal, subprocess, sys, threading, time
from pathlib import Path
journal = Path(sys.argv[1])
stack_answers.start(journal, int, lambda: None)
"""


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


Run = Callable[[str], Done]


@pytest.fixture(scope="module")
def parent() -> Iterator[subprocess.Popen[str]]:
    executable, more = warm.python()
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": os.environ | more}
    with subprocess.Popen([executable, "-c", PARENT], text=True, **pipes) as process:
        yield process


@pytest.fixture
def run(parent: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Run a program that answers questions about its stacks."""

    def to_its_end(code: str) -> Done:
        assert parent.stdin is not None
        assert parent.stdout is not None
        parent.stdin.write(json.dumps([str(tmp_path), BEGIN + code]) + "\n")
        parent.stdin.flush()
        status = int(parent.stdout.readline())
        return Done(status, (tmp_path / "out").read_text(), (tmp_path / "err").read_text())

    return to_its_end


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        # An answer that has been asked for at the last moment.
        ("os.write(stack_answers._current._fd, b'1 what\\n'); sys.exit(6)", 6),
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)", -signal.SIGTERM),
    ],
)
def test_a_process_ends_as_it_would_without_it(run: Run, end: str, status: int) -> None:
    # The last thing that Python does before it looks after threads that are left.
    done = run(f"print('ends', flush=True)\n{end}")

    assert (done.returncode, done.stdout, done.stderr) == (status, "ends\n", "")


def test_a_forked_child_neither_answers_nor_takes_the_questions(run: Run) -> None:
    done = run(
        """
ends, tells = os.pipe(), os.pipe()
if os.fork() == 0:
    open_here = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
    threads = [each.name for each in threading.enumerate()]
    inherited = str(journal.with_suffix(".ask")) in open_here
    os.write(tells[1], repr((inherited, threads)).encode())
    os.read(ends[0], 1)
    # A child that ends in order leaves the parent's files alone.
    sys.exit(0)
print(os.read(tells[0], 1000).decode())
stack_answers.stop()
stack_answers.start(journal, int, lambda: None)
os.write(ends[1], b"!")
os.wait()
print(journal.with_suffix(".ask").exists())
""",
    )

    assert done.stdout == "(False, ['MainThread'])\nTrue\n", done.stderr


def test_no_signal_can_be_delivered_to_our_thread(journal: Path) -> None:
    # A user who waits for one has blocked it in his own threads, and in no others. A thread that
    # is only beginning has all of them blocked, by the C library: this one has begun.
    ask(journal, "1 where\n")
    answer(journal, 1)
    masks = []
    for status in Path("/proc/self/task").glob("*/status"):
        lines = status.read_text().splitlines()
        masks += [int(line.split()[1], 16) for line in lines if line.startswith("SigBlk")]
    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD)

    (blocked,) = (mask for mask in masks if all(mask >> (each - 1) & 1 for each in asked))
    # A fault in it must reach the handlers of faults.
    assert not blocked >> (signal.SIGSEGV - 1) & 1


def test_code_that_joins_all_threads_does_not_wait_for_ours(journal: Path) -> None:
    assert threads() == {threading.current_thread()}
