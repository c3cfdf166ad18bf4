"""Too few threads while the agent starts: /healthz says so, and nothing that was logged is lost."""

from __future__ import annotations

import signal
import sys
import urllib.error
import urllib.request

from node import Node, until
from otlp_receiver import Receiver

# The limit of a container, as Python shows it: no thread that delivers starts before the signal.
AGENT = """
import signal, sys, threading
start, short = threading.Thread.start, True
def limited(thread):
    name = thread.name
    for_a_client = "process_request_thread" in name
    if short and (for_a_client or name in ("otel-ddp-metrics", "otel-ddp-traces", "otel-ddp-logs")):
        raise RuntimeError("can't start new thread")
    start(thread)
def end(*_):
    global short
    short = False
threading.Thread.start = limited
signal.signal(signal.SIGUSR1, end)
from otel_ddp.agent.service import main
sys.exit(main(foreground=True))
"""
TRAIN = """
import otel_ddp
run = otel_ddp.init(run="r")
for step in range(1000):
    run.log({"loss": float(step)}, step=step)
run.finish()
"""
WHY = "does not run: can't start new thread (ulimit -u, or the pids.max of its cgroup)"


def health(node: Node) -> tuple[int, str]:
    url = node.agent()["scrape"].replace("/metrics", "/healthz")
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_what_was_logged_while_threads_were_short_arrives_once_there_are_enough() -> None:
    with Receiver() as receiver, Node(OTEL_DDP_AGENT="external") as node:
        node.export_to(receiver.start_http())
        agent = node.start(sys.executable, "-c", AGENT)
        short, remark = health(node), until(lambda: node.agent()["remark"], "the remark")

        node.run(TRAIN)
        until(lambda: not list(node.place.directory.glob("*.journal")), "the journal to be done")
        early = receiver.attempts.copy()
        agent.send_signal(signal.SIGUSR1)

        def losses() -> list[float]:
            return [each.value for each in receiver.points() if each.metric == "training.scalar"]

        assert receiver.wait_for(lambda _: len(losses()) >= 1000)
        until(lambda: health(node)[0] == 200, "good health")
    assert short == (
        503,
        "".join(f"the thread {name} {WHY}\n" for name in ("metrics", "traces", "logs")),
    )
    # `otel-ddp status` shows it as well.
    assert f"the thread metrics {WHY}" in remark
    assert early == []
    assert sorted(losses()) == [float(step) for step in range(1000)]
