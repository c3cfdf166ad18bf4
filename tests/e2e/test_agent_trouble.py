"""What goes wrong around an agent: disks, locks, places, other people's settings."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from node import Node, finished, until
from otel_ddp.journal.survey import told_by_agent
from otlp_receiver import Point, Receiver

TRAIN = """
import otel_ddp
run = otel_ddp.init(run="r")
for step in range(500):
    run.log({"loss": float(step)}, step=step)
run.finish()
"""

WORK = """
import sys, time
import otel_ddp
run = otel_ddp.init(run="r")
for step in range(100_000):
    run.log({"loss": float(step)}, step=step)
    time.sleep(0.01)
"""

# Logs 1000 values at each line that it reads, three times.
LOGS_WHEN_TOLD = """
import otel_ddp
run = otel_ddp.init(run="kept")
for part in range(1, 4):
    input()
    for step in range(1000 * part, 1000 * part + 1000):
        run.log({"loss": float(step)}, step=step)
run.finish()
"""


def _losses(receiver: Receiver) -> set[float]:
    return {p.value for p in receiver.points() if p.metric == "training.scalar"}


def _first_step(node: Node) -> list[int]:
    """The first step of the loss on the page; none before its history has it."""
    if [each["run"] for each in node.page("runs")["runs"]] != ["r"]:
        return []
    series = node.page("values", run="r", name="loss")["series"]
    return list(series[0]["columns"]["first"][:1]) if series else []


def _faults(node: Node) -> list[str]:
    """What the page says of histories that are not kept."""
    faults = node.page("runs")["faults"]
    return [each for each in faults if each.startswith("Nothing is kept since")]


def test_a_history_that_cannot_be_kept_is_said_everywhere_and_comes_back_whole() -> None:
    with Node() as node:
        process = node.python(WORK)
        folder = Path(node.env["OTEL_DDP_HISTORY_DIR"])
        first = until(lambda: _first_step(node), "the run and its values")
        healthz = node.agent()["scrape"].replace("/metrics", "/healthz")

        shutil.rmtree(folder)
        folder.write_text("in the way")
        why = "no history is kept: is no directory (a link is not followed)"
        until(lambda: node.agent()["remark"] == why, "the agent to say it")
        output = finished(node.start(sys.executable, "-m", "otel_ddp", "status"))
        until(lambda: _faults(node), "the page to say it")
        with pytest.raises(urllib.error.HTTPError) as answer:
            urllib.request.urlopen(healthz, timeout=300)

        folder.unlink()
        until(lambda: node.agent()["remark"] == "", "the folder to be made again")
        again = until(lambda: _first_step(node), "the values in it")
        process.kill()

    assert f"note      {why}" in output
    assert (answer.value.code, answer.value.read().decode()) == (503, f"{why}\n")
    assert again == first


def test_a_place_that_is_removed_in_mid_run_costs_no_value() -> None:
    with Node() as node, Receiver() as receiver:
        node.export_to(receiver.start_http())
        process = node.python(LOGS_WHEN_TOLD)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert receiver.wait_for(lambda r: len(_losses(r)) == 1000)
        first = int(node.agent()["pid"])

        with node.agent_stopped(first):
            shutil.rmtree(node.place.directory)
        process.stdin.write("\n")
        process.stdin.flush()
        log = Path(f"/proc/{first}/fd/2")
        until(lambda: "processes are read and exported" in log.read_text(), "the agent to see it")
        # Another process makes the place anew, with an agent of its own.
        node.run(TRAIN)
        until(lambda: node.place.agent_pid() not in (None, first), "another agent")

        process.communicate("\n", timeout=300)
        assert receiver.wait_for(lambda r: len(_losses(r)) == 3500)
        until(lambda: not os.path.exists(f"/proc/{first}"), "the first agent to leave")


# It becomes another user's at its end: the files of this installation may be closed to that one.
OF_A_STRANGER = """
import os, pathlib, sys
import otel_ddp
run = otel_ddp.init(run="of a stranger")
run.log({"loss": 1.0}, step=1)
run.artifact(sys.argv[1])
place = pathlib.Path(os.environ["OTEL_DDP_DIR"])
for each in (place, *place.iterdir()):
    os.chown(each, 65534, 65534)
place.chmod(0o777)
os.setuid(65534)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's process")
def test_where_another_user_takes_a_removed_place_nothing_is_read_or_written() -> None:
    with Node(OTEL_DDP_LINGER_S="1") as node, Receiver() as receiver:
        node.export_to(receiver.start_http())
        os.chmod(node.root, 0o1777)  # as shared memory is
        secret, store = node.root / "secret", node.root / "store"
        secret.write_text("of the user alone")
        secret.chmod(0o600)
        process = node.start(
            *(sys.executable, "-c", LOGS_WHEN_TOLD), env={"OTEL_DDP_ARTIFACTS": str(store)}
        )
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert receiver.wait_for(lambda r: len(_losses(r)) == 1000)
        first = int(node.agent()["pid"])

        with node.agent_stopped(first):
            shutil.rmtree(node.place.directory)
            stranger = node.start(
                *(sys.executable, "-c", OF_A_STRANGER, str(secret)),
                env={"OTEL_DDP_AGENT": "external"},
            )
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "ready\n"
            theirs = sorted(os.listdir(node.place.directory))
        log = Path(f"/proc/{first}/fd/2")
        until(lambda: "processes are read and exported" in log.read_text(), "the agent to see it")
        # The training looks for its agent meanwhile, and its last values are read.
        output, _ = process.communicate("\n\n", timeout=300)
        assert receiver.wait_for(lambda r: len(_losses(r)) == 3000)
        until(lambda: not os.path.exists(f"/proc/{first}"), "the agent to leave")
        status, _ = node.start(sys.executable, "-m", "otel_ddp", "status").communicate(timeout=300)

        assert (
            status == f"otel-ddp status: {node.place.directory} cannot be read "
            "(belongs to user 65534, not to us).\n"
        )
        assert sorted(os.listdir(node.place.directory)) == theirs
        assert not store.exists()
        histories = [each.name for each in Path(node.env["OTEL_DDP_HISTORY_DIR"]).iterdir()]
        assert "stranger" not in " ".join([*histories, output])
        assert {p.attributes.get("run") for p in receiver.points()} <= {"kept", None}
        stranger.kill()


def test_an_agent_that_stops_ends_the_series_that_it_has_sent() -> None:
    with Node() as node, Receiver() as receiver:
        node.export_to(receiver.start_http())
        ended, lives = (node.python(WORK.replace('"r"', f'"{run}"')) for run in ("over", "lives"))
        both = {"over", "lives"}
        assert receiver.wait_for(lambda it: {p.attributes["run"] for p in _states(it)} == both)
        before = receiver.ended()
        ended.kill()
        assert receiver.wait_for(lambda it: any(p.value == 4 for p in _states(it)))
        # Another agent would come and take the series on.
        lives.send_signal(signal.SIGSTOP)

        node.stop_agent()

        names = {metric for metric, _ in receiver.ended()}
        states = {labels for metric, labels in receiver.ended() if metric == "training.state"}
        assert before == set()
        # Those of the node, of the agent itself, and of what it cannot tell of any more.
        assert {"system.memory.usage", "otel_ddp.agent.cpu.time"} <= names
        # How a run has ended stays: alerts wait a minute before they fire.
        assert ["'lives'" in labels for labels in states] == [True]


def _states(receiver: Receiver) -> list[Point]:
    return [each for each in receiver.points() if each.metric == "training.state"]


def test_a_process_with_other_settings_gets_an_agent_of_its_own_terms_unless_it_serves() -> None:
    with Node() as node, Receiver() as receiver:
        node.run(TRAIN)
        first = int(node.agent()["pid"])

        node.export_to(receiver.start_http())
        busy = node.python(WORK)
        assert receiver.wait_for(lambda r: len(_losses(r)) > 10)
        second = int(node.agent()["pid"])
        assert second != first

        other = node.python(WORK, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:9")
        until(lambda: "other OTEL_* variables" in node.agent()["remark"], "the remark")
        assert node.agent()["pid"] == second
        busy.kill()
        other.kill()


def test_an_address_that_is_not_served_is_said_with_what_to_do() -> None:
    host = "203.0.113.7"
    allowed = {"OTEL_DDP_SCRAPE_TOKEN_FILE": "insecure"}
    with Node(OTEL_EXPORTER_PROMETHEUS_HOST=host, **allowed) as node:
        node.run(TRAIN)
        said = until(lambda: told_by_agent(node.place).agent.get("remark"), "the remark")

    assert said.startswith(f"no scrape endpoint: {host} cannot be bound (")
    assert said.endswith("to an address of this machine, or to 0.0.0.0")
