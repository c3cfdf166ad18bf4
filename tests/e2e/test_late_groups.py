"""Programs that start their ranks by themselves, after our line: hooks tell who they are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from tools.stack.server import free_port

from node import Node, until
from otel_ddp.journal.survey import survey

# One starts itself again with a local rank, as Lightning does; in the other each child opens its
# run before it has a process group. Neither logs anything, and both train until they are ended.
PROGRAM = """
import os, subprocess, sys, time
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.nn.parallel import DistributedDataParallel

import otel_ddp


def fit(rank):
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def batches():
        while True:
            time.sleep(0.03 if rank == 1 else 0.001)
            yield torch.randn(4, 8)

    for batch in otel_ddp.data(batches()):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def child(rank):
    otel_ddp.instrument(group="spawn")
    fit(rank)


if __name__ == "__main__" and sys.argv[1] == "spawn":
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
    torch.multiprocessing.spawn(child, nprocs=2)
elif __name__ == "__main__":
    otel_ddp.instrument(group="itself")
    if "LOCAL_RANK" not in os.environ:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[2])
        os.environ.update(NODE_RANK="0", LOCAL_RANK="0", WORLD_SIZE="2")
        command = [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]
        subprocess.Popen(command, env={**os.environ, "LOCAL_RANK": "1"})
    fit(int(os.environ["LOCAL_RANK"]))
"""
WAYS = ("itself", "spawn")
# The agent waits a minute for processes that do not know their rank, which is far more steps.
SOON = 200


class Seen(NamedTuple):
    """The processes of both, and the first verdict on each."""

    processes: list[dict[str, Any]]
    verdicts: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def launches() -> Iterator[Seen]:
    with Node() as node:
        script = node.root / "program.py"
        script.write_text(PROGRAM)
        for way in WAYS:
            node.warm(str(script), way, str(free_port()))
        seen: dict[str, dict[str, Any]] = {}
        until(lambda: both_seen(node, seen), "verdicts on both runs")
        yield Seen(node.processes(), seen)


def both_seen(node: Node, seen: dict[str, dict[str, Any]]) -> bool:
    for each in survey([node.place]).verdicts:
        way = each["who"].get("group")
        if each["kind"] == "straggler" and way not in seen:
            seen[way] = each
    return len(seen) == len(WAYS)


@pytest.mark.parametrize("way", WAYS)
def test_ranks_that_a_program_starts_by_itself_know_who_they_are_from_their_hooks(
    launches: Seen, way: str
) -> None:
    ranks = [each for each in launches.processes if each["group"] == way]

    assert len({each["run"] for each in ranks}) == 1
    told = [
        (each["rank"], each["local_rank"], each["world_size"], each["settled"]) for each in ranks
    ]
    assert sorted(told) == [(0, 0, 2, True), (1, 1, 2, True)]


@pytest.mark.parametrize("way", WAYS)
def test_a_late_one_among_them_is_named_as_soon_as_elsewhere(launches: Seen, way: str) -> None:
    verdict = launches.verdicts[way]

    assert (verdict["who"]["rank"], verdict["phase"]) == ("1", "data")
    assert verdict["step"] < SOON
