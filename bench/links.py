"""What the link of a run costs its lead: N followers with a report a second each, over TLS.

    python bench/links.py [--nodes 1250] [--seconds 30] [--bytes 1000]

Followers and the lead are those of the agent, in two processes. What is measured is the transport
alone: what the lead's judge does with the reports comes on top.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from otel_ddp.agent.link.follower import Follower
from otel_ddp.agent.link.lead import Lead
from otel_ddp.agent.link.link_pb2 import Answer, Report
from otel_ddp.agent.link.link_thread import LinkThread

SECRET = bytes(range(32))
PORTS = (29_471, 29_472, 29_473)
ROUND_S = 0.1


def cpu_s() -> Counter[str]:
    """The processor time of this process so far, by thread: Python's have names of their own."""
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        name, _, rest = (task / "stat").read_text().rpartition(") ")
        user, system = rest.split()[11:13]
        found[name.partition("(")[2]] += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return found


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def raise_file_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def lead(nodes: int, seconds: float) -> None:
    """Takes reports and answers them, until it has been measured."""
    thread = LinkThread()
    thread.start()
    empty_mib = resident_mib()
    leads = Lead(thread, SECRET, node="node-0", hosts=["127.0.0.1"], ports=PORTS)
    leads.start()
    began = time.monotonic()
    while sum(each.connected for each in leads.nodes().values()) < nodes:
        take_and_answer(leads)
    connected_s = time.monotonic() - began
    connecting = cpu_s()
    until, taken, behind_s = time.monotonic() + seconds, 0, []
    while time.monotonic() < until:
        taken += take_and_answer(leads, behind_s)
    used = cpu_s() - connecting
    print(
        json.dumps(
            {
                "nodes": nodes,
                "connected after s": round(connected_s, 1),
                "connecting took cpu s": round(sum(connecting.values()), 1),
                "reports/s": round(taken / seconds),
                "share of a core": round(sum(used.values()) / seconds, 3),
                "by thread": {k: round(v / seconds, 3) for k, v in used.most_common(5)},
                "MiB": round(resident_mib() - empty_mib),
                "oldest s": round(max(behind_s, default=0.0), 2),
                "dropped": leads.streams.dropped,
                "refused": leads.streams.refused,
            }
        ),
        flush=True,
    )
    thread.stop()


def take_and_answer(leads: Lead, behind_s: list[float] | None = None) -> int:
    time.sleep(ROUND_S)
    reports = leads.take()
    now_ns = time.time_ns()
    for node, report in reports:
        if behind_s is not None:
            behind_s.append((now_ns - report.sent_ns) / 1e9)
        leads.answer(node, Answer(judged=b"x" * 64))
    return len(reports)


def followers(nodes: int, size: int, lead: subprocess.Popen[bytes]) -> None:
    thread = LinkThread()
    thread.start()
    made = [
        Follower(thread, SECRET, node=f"node-{n}", hosts=["127.0.0.1"], ports=PORTS)
        for n in range(1, nodes + 1)
    ]
    for each in made:
        each.start()
    content, turn = os.urandom(size), 0
    began, began_s = time.monotonic(), time.process_time()
    while lead.poll() is None:
        turn += 1
        for number, each in enumerate(made):
            due = began + turn + number / nodes
            if (wait_s := due - time.monotonic()) > 0.005:
                time.sleep(wait_s)
            each.take()
            each.send(Report(history=[content]), steps=8)
    share = (time.process_time() - began_s) / (time.monotonic() - began) / nodes
    dropped = sum(each.dropped_steps for each in made)
    print(f"share of a core of a follower: {share:.4f}, steps dropped: {dropped}")
    thread.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1250)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--bytes", type=int, default=1000)
    parser.add_argument("--lead", action="store_true")
    given = parser.parse_args()
    raise_file_limit()
    if given.lead:
        lead(given.nodes, given.seconds)
        return
    with subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--lead"]) as process:
        followers(given.nodes, given.bytes, process)


if __name__ == "__main__":
    main()
