"""Why a process ended, by what the kernel says: in files of a made-up machine and for real."""

from __future__ import annotations

import os
import platform
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.node.node_trees import NodeTree
from make import Clock
from otel_ddp.agent.judge.observe import ExitCauses

PID, TICKS = 4711, 5000
PAGE = os.sysconf("SC_PAGE_SIZE")
KILLED = (
    "6,900,1000000,-;{}: Killed process {} (py (thon) total-vm:70000000kB, "
    "anon-rss:1048576kB, UID:0 pgtables:123kB oom_score_adj:0\n"
)


class Machine(NodeTree):
    """What we read of a machine on which one process runs, and a clock."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.clock = Clock(500.0)
        self.write("dev/kmsg", "6,1,1,-;Linux version\n")
        self.first_namespace(True)
        self.one_process(PID)

    def one_process(self, pid: int, pages: int = 1000) -> None:
        self.process(pid, name="py) S 1", start=TICKS, pages=pages)
        self.write(f"proc/{pid}/statm", f"9999 {pages} 3 4 0 6 0\n")
        self.write(f"proc/{pid}/cgroup", "")

    def first_namespace(self, true: bool) -> None:
        link = self.root / "proc/self/ns/pid"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to("pid:[4026531836]" if true else "pid:[4026532001]")

    def in_version_2(self, path: str = "/job/rank", top: str = "/", kills: int = 0) -> None:
        self.version_2(path, top=top)
        self.write(f"proc/{PID}/cgroup", f"0::{path}\n")
        self.events(kills, path.removeprefix(top.rstrip("/")))

    def events(self, kills: int, path: str = "/job/rank") -> None:
        self.write(
            f"sys/fs/cgroup{path}/memory.events",
            f"low 0\nhigh 7\nmax 9\noom 3\noom_kill {kills}\noom_group_kill 0\n",
        )

    def says(self, line: str) -> None:
        self.add("dev/kmsg", line)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def start() -> Iterator[Callable[[Machine], ExitCauses]]:
    made: list[ExitCauses] = []

    def begin(machine: Machine) -> ExitCauses:
        made.append(ExitCauses(machine.root, machine.clock))
        made[-1].watch(PID, TICKS)
        return made[-1]

    yield begin
    for each in made:
        each.close()


Start = Callable[[Machine], ExitCauses]


def blind(machine: Machine) -> None:
    """The kernel's log may not be read here, as on most machines."""
    (machine.root / "dev/kmsg").unlink()


def findings(why: dict[str, Any]) -> set[str]:
    return {word for word in why if word.startswith(("out_of", "signal", "exit"))}


# -- out of memory, by the kernel's log


@pytest.mark.parametrize(
    ("words", "scope"),
    [
        ("Memory cgroup out of memory", "memory cgroup"),
        ("Out of memory (oom_kill_allocating_task)", "node"),
    ],
)
def test_the_kernels_log_names_the_process_that_it_killed(
    words: str, scope: str, machine: Machine, start: Start
) -> None:
    found = start(machine)

    machine.says("6,2,2,-;something else\n SUBSYSTEM=x\n" + KILLED.format(words, PID))
    why = found.why(PID, TICKS)

    assert why["out_of_memory"] == "kernel log"
    assert why["out_of_memory_in"] == scope


@pytest.mark.parametrize("why", ["of another process", "before the agent", "another namespace"])
def test_lines_that_are_not_about_this_process_are_ignored(
    why: str, machine: Machine, start: Start
) -> None:
    machine.in_version_2()
    machine.first_namespace(why != "another namespace")
    line = KILLED.format("Memory cgroup out of memory", PID + (why == "of another process"))
    if why == "before the agent":
        machine.says(line)
    found = start(machine)
    if why != "before the agent":
        machine.says(line)
    if why == "of another process":
        # Where it can be read, the log is believed rather than the count.
        machine.events(1)

    assert findings(found.why(PID, TICKS)) == set()


# -- out of memory, by the cgroup's counters


def test_version_2_counts_kills_while_the_log_is_closed(machine: Machine, start: Start) -> None:
    blind(machine)
    # A container sees its part of the tree under a longer path.
    machine.in_version_2(path="/docker/abc", top="/docker/abc", kills=2)
    found = start(machine)

    machine.clock.now += 4
    machine.ends(PID)
    machine.events(3, "")
    why = found.why(PID, TICKS)

    assert why["out_of_memory"] == "cgroup events"
    assert (why["out_of_memory_kills"], why["out_of_memory_within_s"]) == (1, 4.0)
    assert why["out_of_memory_group"].endswith("/sys/fs/cgroup")


def test_a_kill_counted_while_it_was_dying_is_seen_and_an_old_one_is_not(
    machine: Machine, start: Start
) -> None:
    blind(machine)
    machine.in_version_2(kills=1)
    found = start(machine)
    machine.events(2)
    kills = []
    # It takes some seconds to die, and is looked at meanwhile.
    for seconds in (5, 60):
        for _ in range(seconds):
            machine.clock.now += 1
            found.watch(PID, TICKS)
        kills.append(found.why(PID, TICKS).get("out_of_memory_kills"))

    assert kills == [1, None]


# -- memory


def test_the_last_reading_of_its_memory_is_remembered(machine: Machine, start: Start) -> None:
    machine.one_process(PID, pages=2000)
    found = start(machine)

    # A dying process gives its memory back.
    machine.one_process(PID, pages=0)
    machine.clock.now += 2.5
    found.watch(PID, TICKS)

    assert found.why(PID, TICKS)["resident_bytes"] == 2000 * PAGE


# -- the driver


# -- which process it is about


def test_a_number_with_another_owner_is_not_watched(machine: Machine, start: Start) -> None:
    found = start(machine)

    for pid, start_ticks in ((PID, TICKS + 1), (PID + 1, TICKS), (PID, 0)):
        found.watch(pid, start_ticks)
        assert found.why(pid, start_ticks) == {}
    assert found.why(PID, TICKS)["resident_bytes"] == 1000 * PAGE


# -- for real

# What Linux reports from 6.15 on.
TELLS_EXITS = tuple(map(int, platform.release().split(".")[:2])) >= (6, 15)


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    code = "import os, sys; print('there', flush=True); sys.stdin.read(); os._exit(3)"
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def open_files() -> set[str]:
    """What this process has open to look at other processes."""
    held = {name: os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}
    return {name for name, target in held.items() if "pidfd" in target or "kmsg" in target}


def ticks(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_death_wakes_the_agent_and_the_kernel_knows_the_exit_code(
    child: subprocess.Popen[bytes],
) -> None:
    before = open_files()
    found = ExitCauses()
    found.watch(child.pid, ticks(child.pid))
    start_ticks = ticks(child.pid)
    (handle,) = found.handles()
    assert select.select([handle], [], [], 0)[0] == []

    assert child.stdin is not None
    child.stdin.close()

    assert select.select([handle], [], [], 60)[0] == [handle]
    child.wait()
    why = found.why(child.pid, start_ticks)
    known = {"exit_code": 3} if TELLS_EXITS else {}
    assert {word: why[word] for word in findings(why)} == known
    assert why["resident_bytes"] > 1 << 20
    # Its end is known: its descriptor must not wake the agent again and again.
    assert found.handles() == []
    found.forget(child.pid, start_ticks)
    found.close()
    assert open_files() == before
