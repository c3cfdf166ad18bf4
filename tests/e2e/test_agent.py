"""The node agent with real training processes."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import warm
from node import Node, finished, until
from otel_ddp.history.directory import find_run
from otel_ddp.journal.reader import JournalReader
from otlp_receiver import Receiver
from trainings import PROGRAM

TRAIN = """
import otel_ddp
run = otel_ddp.init(group="g", run="r", config={"lr": 0.1, "net": {"depth": 3}})
for step in range(10):
    run.log({"loss": 1.0 / (step + 1), "acc": step}, step=step, epoch=0)
run.log({"loss": 0.5}, step=9, split="validation")
with run.phase("checkpoint"):
    pass
run.finish()
"""
SECOND = TRAIN.replace('run="r"', 'run="second"')
# Logs 100 values for each number that it reads, from 100 times this number on.
LOGS_WHEN_TOLD = """
import sys, time, otel_ddp
run = otel_ddp.init(run="r")
run.log({"once": 42.0}, step=1)
run.log({"bad": float("nan")}, step=1)
for line in sys.stdin:
    for step in range(100 * int(line), 100 * int(line) + 100):
        run.log({"loss": float(step)}, step=step)
        time.sleep(0.002)
    print("logged", flush=True)
"""
# A quarter of a second at its end may be too short for the agent on a busy machine.
PATIENT = """
from otel_ddp.recording import agent_start
agent_start.WAIT_FOR_AGENT_S = 60.0
"""


def test_an_agent_says_that_its_port_is_taken_and_a_second_one_that_there_is_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Node(OTEL_EXPORTER_PROMETHEUS_PORT=str(port)) as node:
            node.run(TRAIN)
            said = node.agent()
            second = node.start(sys.executable, "-m", "otel_ddp", "agent")
            output, _ = second.communicate(timeout=300)

    assert f":{port}/" not in said["scrape"]
    assert f"port {port} is taken" in said["remark"]
    assert second.returncode == 1
    assert "already runs" in output


def test_an_agent_of_the_platform_is_used_and_none_other_started() -> None:
    with Node(OTEL_DDP_AGENT="external") as node:
        node.run(TRAIN)
        assert not node.place.agent_is_alive()

        own = node.start(sys.executable, "-m", "otel_ddp", "agent")
        node.run(TRAIN.replace('run="r"', 'run="r2"'))

        assert node.agent()["pid"] == own.pid
        # What was written before it came is taken as well.
        until(lambda: len(node.series("training_state")) == 2, "both runs")
        own.terminate()
        output = finished(own)
        assert "watching" in output
        assert not node.place.agent_file.exists()


def test_eight_processes_start_one_agent_that_serves_several_runs() -> None:
    with Node() as node:
        ranks = [
            node.python(
                TRAIN.replace('run="r"', f'run="run-{i % 2}"'),
                OTEL_DDP_RANK=str(i // 2),
                OTEL_DDP_LOCAL_RANK=str(i // 2),
                OTEL_DDP_WORLD_SIZE="4",
            )
            for i in range(8)
        ]
        for rank in ranks:
            finished(rank)

        def seen() -> set[tuple[str, str]]:
            return {(found["run"], found["rank"]) for found, _ in node.series("training_state")}

        expected = {(f"run-{run}", str(rank)) for run in range(2) for rank in range(4)}
        until(lambda: seen() == expected, "all ranks of both runs")

        def agents() -> list[str]:
            return [
                pid
                for pid in filter(str.isdigit, os.listdir("/proc"))
                if str(node.place.directory) in _command_line(pid)
                and "agent.service" in _command_line(pid)
            ]

        # One that came second may still be on its way out.
        until(lambda: agents() == [str(node.agent()["pid"])], "one agent to be left")


def _command_line(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_the_agent_leaves_after_its_linger_time_and_takes_the_journals_along() -> None:
    with Node(OTEL_DDP_LINGER_S="1") as node:
        process = node.python(TRAIN + "input()")
        node.agent()
        process.communicate("\n")

        until(lambda: not node.place.agent_is_alive(), "the agent to leave")

        assert node.place.journals() == []
        assert not list(node.place.directory.glob("*.taken"))
        assert not node.place.agent_file.exists()


def test_an_agent_for_a_copied_directory_exports_it_and_deletes_nothing() -> None:
    with Receiver() as receiver, Node(OTEL_DDP_AGENT="off") as node:
        node.export_to(receiver.start_http())
        node.run(TRAIN)
        copy = node.root / "copy"
        shutil.copytree(node.place.directory, copy)
        before = sorted(copy.glob("*.journal"))

        agent = node.start(sys.executable, "-m", "otel_ddp", "agent", "--dir", str(copy))
        assert receiver.wait_for(lambda receiver: bool(receiver.points()))
        node.run(TRAIN, OTEL_DDP_AGENT="external", OTEL_DDP_DIR=str(copy))
        until(lambda: sorted(copy.glob("*.journal")) == before, "the new journal to go")
        agent.send_signal(signal.SIGTERM)
        finished(agent)
        kept = sorted(copy.glob("*.journal"))

    assert "training.scalar" in {point.metric for point in receiver.points()}
    # Its own series end with it. How a run has ended stays: alerts wait a minute before they fire.
    ended = {metric for metric, _ in receiver.ended()}
    assert "otel_ddp.agent.cpu.time" in ended
    assert "training.state" not in ended
    assert kept == before
    assert len(kept) == 1


@pytest.mark.timed
def test_demo_shows_both_ranks_and_leaves_its_history_alone() -> None:
    # Its ranks have torch imported already.
    executable, more = warm.python()
    with Node() as node:
        # A newcomer has not set it: the demo says itself that every step is measured.
        del node.env["OTEL_DDP_OVERHEAD"]
        output = subprocess.run(
            (
                executable,
                *["-m", "otel_ddp", "demo", "--inject", "backward:1:30ms", "--seconds", "12"],
            ),
            env={**node.env, **more},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

        assert output.returncode == 0, output.stderr
        rows = map(str.split, output.stdout.splitlines())
        assert [row[0] for row in rows if "finished" in row] == ["0", "1"]
        (verdict,) = (line for line in output.stdout.splitlines() if line.startswith("  - "))
        assert ": rank 1 (" in verdict
        assert "kept the others waiting: it was late in backward" in verdict
        look = output.stdout.splitlines()[-1].partition("otel-ddp open ")[2]
        with find_run(look, Path(node.env["OTEL_DDP_HISTORY_DIR"])) as run:
            assert (run.state, len(run.ranks)) == ("finished", 2)
    place = Path(output.stdout.partition("--dir ")[2].split()[0])
    assert place.name == "place"
    assert not place.parent.exists()


class Logging:
    """A process that logs when it is told to."""

    def __init__(self, node: Node) -> None:
        self._process = node.python(LOGS_WHEN_TOLD)
        self.told = 0
        self.tell()

    def tell(self) -> None:
        """Have it log another 100 values, and wait until it has."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{self.told}\n")
        self._process.stdin.flush()
        assert "logged\n" in iter(self._process.stdout.readline, "")
        self.told += 1

    def goes_on_until(self, true: Callable[[], bool], what: str) -> None:
        """Only a process that works looks after its agent: it has no thread to do so."""

        def look() -> bool:
            self.tell()
            return true()

        until(look, what)

    def have_come(self, receiver: Receiver) -> bool:
        """Whether all values of this process have arrived, in the order of their logging."""
        return losses(receiver, "r") == [float(number) for number in range(100 * self.told)]

    def end(self) -> None:
        finished(self._process)


def test_a_killed_agent_is_replaced_and_loses_no_value() -> None:
    with Receiver() as receiver, Node() as node:
        node.export_to(receiver.start_http())
        process = Logging(node)
        assert receiver.wait_for(process.have_come)
        # What the next agent does not read again, it takes from the first one's document.
        until(lambda: is_drained(node.place.journals()[0]), "the values to be committed")
        killed = node.kill_agent()

        process.goes_on_until(node.place.agent_is_alive, "another agent")

        assert node.agent()["pid"] != killed
        until(lambda: node.value("training_step") == 100 * process.told - 1, "the last step")
        assert node.value("training_scalar", name="once") == 42.0
        # The first one had read it; nothing as low has come since.
        assert node.value("training_scalar_best", name="loss") == 0.0
        assert node.value("training_nonfinite_total", name="bad") == 1.0
        assert node.value("otel_ddp_records_lost_total", why="overwritten") == 0.0
        assert receiver.wait_for(process.have_come)


def test_a_place_that_is_removed_in_mid_run_costs_no_value() -> None:
    with Receiver() as receiver, Node() as node:
        node.export_to(receiver.start_http())
        process = Logging(node)
        assert receiver.wait_for(process.have_come)
        first = int(node.agent()["pid"])

        with node.agent_stopped(first):
            shutil.rmtree(node.place.directory)
        process.tell()
        log = Path(f"/proc/{first}/fd/2")
        until(lambda: "processes are read and exported" in log.read_text(), "the agent to see it")
        # Another process makes the place anew, with an agent of its own.
        node.run(SECOND)
        until(lambda: node.place.agent_pid() not in (None, first), "another agent")

        process.tell()
        process.end()
        assert receiver.wait_for(process.have_come)
        assert receiver.wait_for(lambda r: len(losses(r, "second")) == 10)
        until(lambda: not os.path.exists(f"/proc/{first}"), "the first agent to leave")


def test_a_process_with_other_settings_gets_an_agent_of_its_own_terms_unless_it_serves() -> None:
    with Receiver() as receiver, Node() as node:
        node.run(TRAIN)
        first = int(node.agent()["pid"])

        node.export_to(receiver.start_http())
        busy = Logging(node)
        busy.goes_on_until(lambda: node.place.agent_pid() not in (None, first), "another agent")
        busy.tell()
        assert receiver.wait_for(lambda r: bool(losses(r, "r")))
        second = int(node.agent()["pid"])

        node.python(LOGS_WHEN_TOLD, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
        until(lambda: "other OTEL_* variables" in node.agent()["remark"], "the remark")
        assert node.agent()["pid"] == second


def is_drained(journal: Path) -> bool:
    """Whether all that a journal holds is committed."""
    with contextlib.closing(JournalReader(journal)) as reader:
        return reader.drained()


def losses(receiver: Receiver, run: str) -> list[float]:
    """The values of the loss in the order of their times; one that came twice counts once."""
    found = {
        each.time_ns: each.value
        for each in receiver.points()
        if each.metric == "training.scalar"
        and (each.attributes["run"], each.attributes["name"]) == (run, "loss")
        and each.attributes["split"] == "train"
    }
    return [found[at] for at in sorted(found)]


def test_a_process_ends_with_its_last_values_on_disk_where_no_collector_takes_them() -> None:
    with Receiver() as receiver, Node() as node:
        node.export_to(receiver.start_http())
        # Accepts and never answers: the worst of the collectors.
        receiver.set_mode("hang")
        node.run(TRAIN)
        node.agent()

        node.run(PATIENT + SECOND)

        # Not "soon": a container ends with its main process, and the agent with it.
        for path in node.place.journals():
            assert is_drained(path)
        node.kill_agent()
        shutil.rmtree(node.place.directory)
        receiver.set_mode("ok")
        node.run(TRAIN.replace('run="r"', 'run="third"'))

        expected = [1.0 / (step + 1) for step in range(10)]
        for run in ("r", "second", "third"):
            assert receiver.wait_for(lambda r, run=run: losses(r, run) == expected), run
        assert receiver.wait_for(lambda r: "checkpoint" in named(r.spans(), "second"))
        assert receiver.wait_for(lambda r: named(r.logs(), "second"))
        # Its end as well: whoever takes over the last value has seen that it finished.
        states = [each for each in receiver.points() if each.metric == "training.state"]
        assert 2.0 in {each.value for each in states if each.attributes["run"] == "second"}


def named(found: list[Any], run: str) -> set[str]:
    """The names of the spans or log records of a run."""
    return {
        getattr(each, "name", "") or each.event_name
        for each in found
        if ("run", run) in {(pair.key, pair.value.string_value) for pair in each.attributes}
    }


def test_the_agent_belongs_to_nobody_and_inherits_neither_directory_nor_open_file() -> None:
    # torch's FileStore locks a file whose descriptor survives exec: an agent that had it too
    # would keep the lock for ever, and hang the job.
    code = """
import os, sys
import otel_ddp
os.set_inheritable(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), True)
run = otel_ddp.init(run="r")
print("there", flush=True)
sys.stdin.read()
"""
    with Node() as node:
        path = str(node.root / "locked")
        process = node.start(sys.executable, "-c", code, path)
        assert process.stdout is not None
        process.stdout.readline()

        pid = node.agent()["pid"]

        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        assert os.getsid(pid) != os.getsid(process.pid)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children == []
        assert path in open_files_of(process.pid)
        assert path not in open_files_of(pid)
        finished(process)


def open_files_of(pid: int) -> set[str]:
    return {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir()}


def listened_on(pid: int) -> list[str]:
    """The local ends on which a process listens, as the kernel writes them."""
    inodes = {os.readlink(each) for each in Path(f"/proc/{pid}/fd").iterdir() if each.is_symlink()}
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def test_the_agent_of_a_run_on_one_node_opens_no_port_for_others_and_loads_nothing_for_it(
    tmp_path: Path,
) -> None:
    with Node() as node:
        node.torchrun(2, str(PROGRAM), str(tmp_path))
        pid = int(node.agent()["pid"])
        until(lambda: len(node.series("training_scalar", name="samples")) == 2, "both ranks")

        ends = listened_on(pid)
        loaded = Path(f"/proc/{pid}/maps").read_text()

    # Its endpoint, on 127.0.0.1.
    assert [end.partition(":")[0] for end in ends] == ["0100007F"]
    assert "cygrpc" not in loaded
    assert "cryptography" not in loaded
