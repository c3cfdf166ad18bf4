"""Hangs of real ranks, as the real agent tells of them: who, where and why."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from node import Node, until, without_figures

# A rank that is given no core for two seconds hangs as well.
pytestmark = pytest.mark.timed

LIMIT_S, STEPS, ODD = 2, 10, 1

TRAIN = """
import ctypes, os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

STEPS, ODD = 10, 1
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2)
other = dist.new_group([0, 1])


def batches(name):
    for step in range(STEPS + 2):
        if (rank, step, name) == (ODD, STEPS, "data"):
            signal.pause()
        yield torch.randn(4, 8)


def synchronise(name, mine):
    if name == "late" and mine:
        signal.pause()
    if name == "skips" and mine:
        dist.barrier(group=other)
    elif name == "differs" and mine:
        dist.broadcast(torch.ones(1), src=0)
    else:
        dist.all_reduce(torch.ones(1))


def main(name):
    model = DistributedDataParallel(nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = otel_ddp.instrument(model, group="g", run=name)
    for step, batch in enumerate(otel_ddp.data(batches(name))):
        mine = (rank, step) == (ODD, STEPS)
        loss = model(batch).sum()
        if name == "gil" and mine:
            # C code that keeps the interpreter's lock.
            ctypes.PyDLL(None).pause()
        loss.backward()
        if step == STEPS:
            synchronise(name, mine)
        if name == "stopped" and mine:
            os.kill(os.getpid(), signal.SIGSTOP)
        optimizer.step()
        optimizer.zero_grad()
        if name == "moves" and step == STEPS:
            # Without a sign that any hook sees.
            with run.phase("evaluation of mine"):
                while True:
                    dist.all_reduce(torch.ones(1), group=other)
                    time.sleep(0.01)
    run.finish()


main(sys.argv[1])
dist.destroy_process_group()
"""


class Way(NamedTuple):
    """What is to be said of two ranks that hang in one way."""

    cause: str
    culprits: list[str]
    phase: str
    words: str


HOW = {
    # That it sleeps is told from the second look on.
    "data": Way("not_reached", ["1"], "data", "(batches)"),
    # No hook sees this collective: all are in `other`, and their witnesses tell them apart.
    "late": Way("not_reached", ["1"], "other", "(synchronise)"),
    # It holds the lock where forward is over and backward has not begun.
    "gil": Way("gil", ["1"], "other", "rank 1"),
    "stopped": Way("stopped", ["1"], "other", "rank 1"),
    # Each has entered one that the other has not: in another process group.
    "skips": Way("crossed", ["0", "1"], "other", "the order of their collectives"),
    "differs": Way("different_collectives", ["0", "1"], "other", "rank 1 entered broadcast [[1]]"),
}
MOVES = "moves"


def moves_for_long(process: dict[str, Any]) -> bool:
    """Or is no part of the run that moves."""
    since_ns = process["phase_since_ns"] + 2 * LIMIT_S * 10**9
    return process["run"] != MOVES or (
        process["phase"] == "evaluation of mine" and time.time_ns() > since_ns
    )


class Seen(NamedTuple):
    """What was said of all of them, side by side."""

    stalls: dict[str, dict[str, Any]]
    """By run, once each has its words and the last has moved for long."""
    death: str
    """Of one that is ended: the verdict on its end."""
    last: list[str]
    """And what status and post-mortem say of the hang."""


@pytest.fixture(scope="module")
def seen() -> Seen:
    with Node(OTEL_DDP_STALL_TIMEOUT_S=str(LIMIT_S)) as node:
        script = node.root / "train.py"
        script.write_text(TRAIN)
        # Without a launcher: its workers would outlive it, and these do not end.
        for how in (*HOW, MOVES):
            for rank in "01":
                node.warm(
                    *(str(script), how, f"file://{node.root}/{how}"),
                    env={"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"},
                )

        def all_said() -> dict[str, dict[str, Any]] | None:
            found = stalls(node.told().verdicts)
            said = all(way.words in str(found.get(how)) for how, way in HOW.items())
            return found if said and all(map(moves_for_long, node.processes())) else None

        found = until(all_said, "the verdicts")
        pids = {(each["run"], each["rank"]): each["pid"] for each in node.processes()}
        # As a launcher does, one after the other.
        for ended in (1, 2):
            os.kill(pids["late", ended - 1], signal.SIGTERM)
            death = until(lambda ended=ended: death_of(node, "late", ended), "its end")
        last = [stalls(node.told().past)["late"]]
        written = (node.root / "history").glob("postmortem-late*.json")
        last += [json.loads(path.read_text())["verdict"] for path in written]
    told = [each["sentence"] for each in last if each["kind"] == "stall"]
    return Seen(found, death["sentence"], told)


def stalls(verdicts: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By run."""
    return {each["who"]["run"]: each for each in verdicts if each["kind"] == "stall"}


def death_of(node: Node, run: str, ended: int) -> dict[str, Any] | None:
    """The verdict on the ends of so many ranks."""
    for each in node.told().verdicts:
        if (each["kind"], each["who"]["run"]) == ("death", run):
            return dict(each) if len(each["evidence"]["ended"]) == ended else None
    return None


def lasting(sentence: str) -> str:
    """What does not change while ranks stand; that one sleeps is told from the second look on."""
    return without_figures(sentence).replace(" and sleeps", "")


@pytest.mark.parametrize("how", HOW)
def test_ranks_that_hang_each_in_their_way_are_named(seen: Seen, how: str) -> None:
    verdict, way = seen.stalls[how], HOW[how]

    assert (verdict["evidence"]["cause"], verdict["evidence"]["culprits"]) == way[:2]
    # The last step that was completed.
    assert (verdict["phase"], verdict["step"]) == (way.phase, STEPS)
    if way.cause == "not_reached":
        assert "train.py:" in verdict["sentence"]
        assert "rank 0 waits for it" in verdict["sentence"]


def test_a_loop_of_collectives_that_no_hook_sees_is_no_stall(seen: Seen) -> None:
    assert MOVES not in seen.stalls


def test_a_hang_that_is_ended_is_told_as_it_stood(seen: Seen) -> None:
    known = lasting(seen.stalls["late"]["sentence"])

    assert [*map(lasting, seen.last)] == [known, known]
    why = known.partition("): ")[2].partition(". Look")[0]
    end = lasting(f"Before that, no rank had moved for 8 s: {why}.")
    assert lasting(seen.death).endswith(end)
