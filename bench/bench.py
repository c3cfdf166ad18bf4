"""What otel_ddp costs, measured here and now: `make bench` prints the README's table.

Ratios and limits, not digits: run it on a quiet machine, and name the machine.
"""

from __future__ import annotations

import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from node import Node, finished, until  # noqa: E402
from otlp_receiver import Receiver  # noqa: E402

Row = tuple[str, str, str]

LOG = """
import gc, time
import otel_ddp
run = otel_ddp.init(run="bench")
values = {f"metric_{i}": i * 0.1 for i in range(10)}
for step in range(2000):
    run.log(values, step=step)
gc.collect()
took = []
clock = time.perf_counter_ns
empty = sorted(clock() - clock() for _ in range(2000))[1000]
for step in range(100_000):
    before = clock()
    run.log(values, step=step)
    took.append(clock() - before + empty)
    if step % 100 == 0:
        time.sleep(0.001)
took.sort()
print(took[50_000] / 1000, took[99_000] / 1000)
"""

START = """
import os, time
before = time.perf_counter()
import otel_ddp
run = otel_ddp.init(run="bench")
took = time.perf_counter() - before
import threading
sockets = [fd for fd in os.listdir("/proc/self/fd")
           if os.path.exists(f"/proc/self/fd/{fd}")
           and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")]
print(took * 1000, len(threading.enumerate()) - 1, len(sockets))
"""

END = """
import time
import otel_ddp
run = otel_ddp.init(run="bench")
time.sleep(1.5)
for step in range(1000):
    run.log({"loss": step * 0.1}, step=step)
before = time.perf_counter()
run.finish()
print((time.perf_counter() - before) * 1000)
"""

RANK = """
import sys, time
import otel_ddp
rate, seconds = float(sys.argv[1]), float(sys.argv[2])
run = otel_ddp.init(run="bench")
values = {f"metric_{i}": i * 0.1 for i in range(5)}
began = time.perf_counter()
step = 0
while time.perf_counter() - began < seconds:
    run.log(values, step=step)
    step += 1
    time.sleep(max(0.0, began + step / rate - time.perf_counter()))
print(step)
run.finish()
"""


def log_cost() -> list[Row]:
    with Node(OTEL_DDP_JOURNAL_BYTES="2M") as node:
        rounds = [[float(each) for each in node.run(LOG).split()] for _ in range(3)]
    median = statistics.median(each[0] for each in rounds)
    late = statistics.median(each[1] for each in rounds)
    return [
        ("`run.log` of ten floats, median", "<= 3 us", f"{median:.2f} us"),
        ("`run.log` of ten floats, p99", "<= 10 us", f"{late:.2f} us"),
    ]


def import_cost() -> list[Row]:
    def best(code: str) -> float:
        took = []
        for _ in range(15):
            before = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            took.append(time.perf_counter() - before)
        return statistics.quantiles(took, n=4)[0] * 1000

    bare, ours = best("pass"), best("import otel_ddp")
    return [("`import otel_ddp` over bare Python", "<= 15 ms", f"{ours - bare:.1f} ms")]


def start_cost() -> list[Row]:
    took, threads, sockets = [], set(), set()
    for _ in range(7):
        with Node() as node:
            ms, thread, held = node.run(START).split()
        took.append(float(ms))
        threads.add(thread)
        sockets.add(held)
    return [
        (
            "import and `init()`, agent started",
            "<= 100 ms",
            f"{statistics.median(took):.0f} ms (worst {max(took):.0f})",
        ),
        (
            "threads and sockets in the training process",
            "none",
            f"{'/'.join(sorted(threads))} and {'/'.join(sorted(sockets))}",
        ),
    ]


@contextmanager
def unroutable() -> Iterator[str]:
    """A port that neither accepts nor refuses: its queue of connections is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        crowd = []
        for _ in range(4):
            each = socket.socket()
            each.setblocking(False)
            each.connect_ex(address)
            crowd.append(each)
        yield f"http://127.0.0.1:{address[1]}"
        for each in crowd:
            each.close()


HOOKS = """
import os, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import otel_ddp
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.ones(4, 8)
run = otel_ddp.init(run="bench")
clock = time.perf_counter
def block():
    took = []
    for batch in [inputs] * 300:
        before = clock()
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        took.append(clock() - before)
    took.sort()
    return took[75]
block()
with_us, bare = [], []
for _ in range(15):
    bare.append(block())
    otel_ddp.instrument(model)
    with_us.append(block())
    otel_ddp.uninstrument()
bare.sort(); with_us.sort()
print((with_us[7] - bare[7]) * 1e6, bare[7] * 1e6)
"""


def hook_cost() -> list[Row]:
    with Node(OTEL_DDP_AGENT="off") as node:
        cost, bare = (float(each) for each in node.run(HOOKS).split())
    return [
        (
            f"all hooks of one DDP step (of {bare:.0f} us), torch's way of calling them included",
            "<= 15 us",
            f"{cost:.1f} us",
        )
    ]


def exit_cost() -> list[Row]:
    rows = []
    for state in ("healthy", "refusing", "silent", "unroutable"):
        with Receiver() as receiver, unroutable() as nowhere, Node() as node:
            endpoint = nowhere if state == "unroutable" else receiver.start_http()
            receiver.set_mode({"refusing": 503, "silent": "hang"}.get(state, "ok"))
            node.export_to(endpoint)
            took = [float(node.run(END)) for _ in range(5)]
        rows.append(
            (
                f"`finish()`, collector {state}",
                "<= 300 ms",
                f"{statistics.median(took):.0f} ms (worst {max(took):.0f})",
            )
        )
    return rows


def agent_cost(rate: float, seconds: float = 20.0, ranks: int = 8) -> list[Row]:
    with Receiver() as receiver, Node() as node:
        node.env["OTEL_METRIC_EXPORT_INTERVAL"] = "5000"
        sink = node.start(sys.executable, str(ROOT / "bench" / "sink.py"))
        assert sink.stdout is not None
        node.export_to(sink.stdout.readline().strip())
        processes = [
            node.start(
                *(sys.executable, "-c", RANK, str(rate), str(seconds + 8)),
                env={
                    "OTEL_DDP_RANK": str(rank),
                    "OTEL_DDP_LOCAL_RANK": str(rank),
                    "OTEL_DDP_WORLD_SIZE": str(ranks),
                },
            )
            for rank in range(ranks)
        ]
        pid = int(node.agent()["pid"])
        until(lambda: len(node.series("training_state")) == ranks, "all ranks")
        before, began = _cpu_s(pid), time.perf_counter()
        time.sleep(seconds)
        share = (_cpu_s(pid) - before) / (time.perf_counter() - began)
        memory = _rss_bytes(pid)
        url = node.agent()["scrape"]
        scrapes = [_scrape_s(url) for _ in range(20)]
        logged = sum(int(finished(process)) for process in processes)
        until(lambda: len(node.series("training_state")) == ranks, "all ranks")
        lost = sum(value for _, value in node.series("otel_ddp_records_lost_total"))
        node.stop_agent()
        assert sink.stdin is not None
        received = int(finished(sink))
        del receiver
    name = f"agent, {ranks} ranks at {rate:g} steps/s, 5 values a step"
    missing = logged * 5 - received
    return [
        (
            f"{name}: share of a core",
            "<= 4 %" if rate <= 10 else "<= 25 %",
            f"{share * 100:.1f} %",
        ),
        (f"{name}: memory", "<= 120 MB", f"{memory / 1e6:.0f} MB"),
        (f"{name}: scrape", "<= 30 ms", f"{statistics.median(scrapes) * 1000:.1f} ms"),
        (
            f"{name}: values lost of {logged * 5}",
            "0",
            f"{missing} ({lost:.0f} records overwritten)",
        ),
    ]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def _scrape_s(url: str) -> float:
    before = time.perf_counter()
    with urllib.request.urlopen(url, timeout=10) as answer:
        answer.read()
    return time.perf_counter() - before


def machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return f"{os.cpu_count()} cores of {model}, Linux, Python {platform.python_version()}"


def main() -> None:
    parts = {
        "log": log_cost,
        "import": import_cost,
        "start": start_cost,
        "hooks": hook_cost,
        "exit": exit_cost,
        "agent": lambda: agent_cost(10.0),
        "agent-fast": lambda: agent_cost(100.0),
    }
    asked = sys.argv[1:] or list(parts)
    print(f"Measured on {machine()}.\n")
    print("| what | limit | measured |\n|---|---|---|")
    for part in asked:
        for row in parts[part]():
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
