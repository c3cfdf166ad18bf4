"""Many steps: whether memory, descriptors and threads stay as they are, and no value is lost.

`python bench/soak.py [STEPS]` prints a table, of a rank and its agent.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), *map(str, (ROOT, ROOT / "tests"))]

from bench import machine  # noqa: E402

from node import Node, finished, until  # noqa: E402

PARTS = 10
# Waits at the end of each part until it is looked at; its agent works meanwhile.
TRAIN = """
import sys, time
import torch
from torch import nn
import otel_ddp

steps, rate = int(sys.argv[1]), float(sys.argv[2])
torch.set_num_threads(1)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
inputs = torch.ones(4, 8)
run = otel_ddp.instrument(model, run="soak")
began = time.perf_counter()
for step in range(1, steps + 1):
    optimizer.zero_grad()
    loss = model(inputs).sum()
    loss.backward()
    optimizer.step()
    run.log({"loss": float(step)}, step=step)
    if rate and (ahead := began + step / rate - time.perf_counter()) > 0:
        time.sleep(ahead)
    if step % (steps // 10) == 0:
        print(step, flush=True)
        input()
"""


class Taken(NamedTuple):
    """What a process takes."""

    memory_mb: float
    descriptors: int
    threads: int


def taken(pid: int) -> Taken:
    # Without the pages of libraries, of which each new operation touches some.
    ours = ("Pss_Anon:", "Pss_Shmem:")
    lines = [line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
    return Taken(
        sum(int(line[1]) for line in lines if line[0] in ours) / 1024,
        len(os.listdir(f"/proc/{pid}/fd")),
        len(os.listdir(f"/proc/{pid}/task")),
    )


def soak(steps: int, rate: float) -> Iterator[str]:
    sink = subprocess.Popen(
        [sys.executable, Path(__file__).with_name("sink.py"), "loss"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert sink.stdout is not None
    with Node() as node:
        node.export_to(sink.stdout.readline().strip())
        rank = node.start(sys.executable, "-c", TRAIN, str(steps), str(rate))
        assert rank.stdin is not None
        assert rank.stdout is not None
        for _ in range(PARTS):
            while not (line := rank.stdout.readline()).strip().isdigit():
                assert line, "the training ended"
            agent = int(node.agent()["pid"])
            yield _row(f"{int(line):,}", taken(rank.pid), taken(agent))
            rank.stdin.write("\n")
            rank.stdin.flush()
        finished(rank)
        until(lambda: node.value("training_state") == 2.0, "the end to be told")
        overwritten = node.value("otel_ddp_records_lost_total", why="overwritten")
        node.stop_agent()
    told, _ = sink.communicate(timeout=600)
    yield f"\n{int(told):,} of {steps:,} values arrived; {overwritten:g} records were overwritten."


def _row(steps: str, rank: Taken, agent: Taken) -> str:
    both = (
        f"{each.memory_mb:.1f} MB, {each.descriptors}, {each.threads}" for each in (rank, agent)
    )
    return f"| {steps} | {' | '.join(both)} |"


def main() -> None:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    print(f"On {machine()}.")
    for count, rate in ((steps, 1000.0), (steps // 100, 100.0)):
        print(f"\nAt {rate:g} steps/s at most: memory, descriptors, threads.\n")
        print("| steps | rank | agent |\n|---|---|---|")
        for row in soak(count, rate):
            print(row, flush=True)


if __name__ == "__main__":
    main()
