"""The node agent with real training processes."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from node import Node, finished, until
from otel_ddp.agent.export.otlp import SIGNALS
from otel_ddp.agent.export.spool import Spool
from otel_ddp.journal.reader import JournalReader
from otlp_receiver import Receiver, points_in

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

# Works until its input ends; says when it stands where the test wants it.
WAIT = """
import sys
import otel_ddp
run = otel_ddp.init(run="r")
run.log({"loss": 0.5}, step=17)
with run.phase("backward"):
    print("there", flush=True)
    sys.stdin.read()
"""


def test_what_a_process_logged_is_on_the_endpoint_after_it_ended() -> None:
    with Node() as node:
        node.run(TRAIN)

        until(lambda: node.value("training_state") == 2.0, "the end to be seen")
        assert node.value("training_scalar", name="loss", split="train") == 0.1
        assert node.value("training_scalar_step", name="loss", split="train") == 9.0
        assert node.value("training_scalar", name="loss", split="val") == 0.5
        assert node.value("training_scalar_epoch", name="acc") == 0.0
        assert node.value("training_nonfinite_total", name="loss", split="val") == 0.0
        assert node.value("training_checkpoint_duration_seconds_count") == 1.0
        assert node.value("training_step") == 9.0
        assert node.value("training_world_size") == 1.0
        ((info, one),) = node.series("training_run_info")
        assert one == 1.0
        assert (info["config_lr"], info["config_net_depth"]) == ("0.1", "3")
        labels = [info[name] for name in ("group", "run", "job_type", "rank", "local_rank")]
        assert labels == ["g", "r", "train", "0", "0"]


def test_nothing_configured_means_scrape_only_and_the_status_says_so() -> None:
    with Node() as node:
        node.run(TRAIN)

        said = node.agent()
        output = finished(node.start(sys.executable, "-m", "otel_ddp", "status"))

        assert said["export"].endswith("scrape only")
        assert "scrape only" in output
        assert said["scrape"] in output
        assert "run r, group g, train, world 1" in output
        assert not node.spool.exists()


def test_a_killed_rank_is_known_with_its_step_and_phase() -> None:
    with Node() as node:
        process = node.python(WAIT)
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        until(lambda: node.value("training_state") == 1.0, "the rank to be seen at work")

        process.send_signal(signal.SIGKILL)
        process.wait()

        until(lambda: node.value("training_state") == 4.0, "the death to be seen")
        assert node.value("training_phase") == 3.0
        assert node.value("training_step") == 17.0
        ((status),) = node.processes()
        assert (status["state"], status["step"], status["phase"]) == ("killed", 17, "backward")
        output = finished(node.start(sys.executable, "-m", "otel_ddp", "status"))
        assert "killed" in output
        assert "ended without a report" in output
        shown = json.loads(
            finished(node.start(sys.executable, "-m", "otel_ddp", "status", "--json"))
        )
        assert shown["processes"][0]["phase"] == "backward"


def test_a_port_that_is_taken_is_no_error_and_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with Node(OTEL_EXPORTER_PROMETHEUS_PORT=str(port)) as node:
            node.run(TRAIN)

            said = node.agent()

            assert f":{port}/" not in said["scrape"]
            assert said["remark"].startswith(f"port {port} is taken")
            until(lambda: node.value("training_step") == 9.0, "the run on the other port")


@pytest.mark.parametrize("how", [{"OTEL_SDK_DISABLED": "true"}, {"OTEL_DDP_AGENT": "off"}])
def test_no_agent_where_none_is_wanted(how: dict[str, str]) -> None:
    with Node(**how) as node:
        node.run(TRAIN)

        assert not node.place.agent_is_alive()
        assert len(node.place.journals()) == (0 if "OTEL_SDK_DISABLED" in how else 1)


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
        node.run(TRAIN)
        node.agent()

        until(lambda: not node.place.agent_is_alive(), "the agent to leave")

        assert node.place.journals() == []
        assert not list(node.place.directory.glob("*.taken"))
        assert not node.place.agent_file.exists()


def test_a_killed_agent_is_replaced_and_totals_go_on() -> None:
    code = """
import sys, otel_ddp
run = otel_ddp.init(run="r")
run.log({"once": 42.0}, step=1)
run.log({"bad": float("nan")}, step=1)
for line in sys.stdin:
    run.log({"loss": float(line)}, step=int(line))
    print("logged", flush=True)
"""
    with Node() as node:
        process = node.python(code)
        assert process.stdin is not None
        assert process.stdout is not None

        def tell(step: int) -> None:
            process.stdin.write(f"{step}\n")
            process.stdin.flush()
            assert process.stdout.readline() == "logged\n"

        tell(2)
        until(lambda: node.value("training_step") == 2.0, "the first steps")
        killed = node.kill_agent()

        step = 2

        def replaced() -> bool:
            # Only a process that works looks after its agent: it has no thread to do so.
            nonlocal step
            step += 1
            tell(step)
            return node.place.agent_is_alive()

        until(replaced, "another agent")

        assert node.agent()["pid"] != killed
        until(lambda: node.value("training_step") == step, "the last step")
        assert node.value("training_scalar", name="once") == 42.0
        assert node.value("training_nonfinite_total", name="bad") == 1.0
        assert node.value("otel_ddp_records_lost_total", why="overwritten") == 0.0


def test_a_process_ends_with_its_last_values_on_disk_where_no_collector_takes_them() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, Node() as node:
        # Accepts and never answers: the worst of the collectors.
        node.export_to(f"http://127.0.0.1:{silent.getsockname()[1]}")
        node.run(TRAIN)
        node.agent()

        node.run(TRAIN.replace('run="r"', 'run="second"'))

        # Not "soon": a container ends with its main process, and the agent with it.
        for path in node.place.journals():
            reader = JournalReader(path)
            assert reader.drained()
            reader.close()
        node.kill_agent()
        (folder,) = node.spool.iterdir()
        kept = Spool(folder, 1 << 30)
        signals = set()
        states = set()
        for signal_name in SIGNALS:
            while (entry := kept.oldest(signal_name)) is not None:
                signals.add(signal_name)
                if signal_name == "metrics":
                    states |= _states_of("second", entry.read() or b"")
                kept.remove(entry, "delivered")
        assert signals == {"metrics", "traces", "logs"}
        # Its end as well: whoever takes over the last value has seen that it finished.
        assert 2.0 in states


def _states_of(run: str, body: bytes) -> set[float]:
    states = (each for each in points_in(body) if each.metric == "training.state")
    return {each.value for each in states if each.attributes["run"] == run}


def test_an_agent_killed_before_it_could_read_leaves_everything_to_the_next() -> None:
    with Node() as node:
        node.run(TRAIN, OTEL_DDP_AGENT="off")
        node.run(TRAIN.replace('run="r"', 'run="second"'))

        until(lambda: len(node.series("training_state")) == 2, "both runs")
        assert node.value("training_scalar", run="r", name="loss", split="train") == 0.1


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
    assert kept == before
    assert len(kept) == 1


def test_a_foreign_file_in_the_place_is_said_and_harms_nothing() -> None:
    with Node() as node:
        node.run(TRAIN, OTEL_DDP_AGENT="off")
        (node.place.directory / "1-foreign.journal").write_bytes(os.urandom(5000))
        (node.place.directory / "2-empty.journal").touch()

        node.run(TRAIN.replace('run="r"', 'run="second"'))

        until(lambda: len(node.series("training_state")) == 2, "both runs")
        output = finished(node.start(sys.executable, "-m", "otel_ddp", "status"))
        assert output.count("is not a journal") == 2


def test_the_agent_holds_no_working_directory_and_belongs_to_nobody() -> None:
    with Node() as node:
        process = node.python(WAIT)
        assert process.stdout is not None
        process.stdout.readline()

        pid = node.agent()["pid"]

        assert os.readlink(f"/proc/{pid}/cwd") == "/"
        assert os.getsid(pid) != os.getsid(process.pid)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children == []
        finished(process)


def test_the_agent_inherits_no_open_file_of_the_training_process() -> None:
    # torch's FileStore locks a file whose descriptor survives exec: an agent that had it too
    # would keep the lock for ever, and hang the job.
    code = """
import fcntl, os, sys
import otel_ddp
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.set_inheritable(fd, True)
fcntl.flock(fd, fcntl.LOCK_EX)
run = otel_ddp.init(run="r")
"""
    with Node() as node:
        path = node.root / "locked"
        finished(node.start(sys.executable, "-c", code, str(path)))
        node.agent()

        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_demo_shows_both_ranks_and_leaves_nothing() -> None:
    # Its ranks have torch imported already.
    executable, more = warm.python()
    with Node() as node:
        output = subprocess.run(
            [executable, "-m", "otel_ddp", "demo", "--inject", "backward:1:30ms"],
            env={**node.env, **more},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

        assert output.returncode == 0, output.stderr
        rows = map(str.split, output.stdout.splitlines())
        assert [row[0] for row in rows if "finished" in row] == ["0", "1"]
        assert "best accuracy (val)" in output.stdout
        verdicts = output.stdout.partition("Verdicts:")[2]
        assert "rank 1" in verdicts
        assert "kept the others waiting: it was late in backward" in verdicts
    place = Path(output.stdout.partition("--dir ")[2].split()[0])
    assert place.name == "place"
    assert not place.parent.exists()


def test_a_second_agent_says_that_there_is_one() -> None:
    with Node() as node:
        node.run(TRAIN)
        node.agent()

        second = node.start(sys.executable, "-m", "otel_ddp", "agent")
        output, _ = second.communicate(timeout=300)

        assert second.returncode == 1
        assert "already runs" in output
