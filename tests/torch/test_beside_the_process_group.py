"""We call no collective, wait for no store, and leave the process group to the user."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import otel_ddp
from conftest import Here
from loops import INPUT, train
from node import Node, finished
from otel_ddp.identity.identity import GroupFacts, resolve
from otel_ddp.torch import process_group

# Rank 0 alone has a run, as in a script that gates it by rank: with one collective of ours the two
# would not fit together any more.
TRAIN = """
import json, os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

folder, rank = os.environ["FOLDER"], int(os.environ["RANK"])
dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = otel_ddp.instrument(model, config={"lr": 0.01}) if rank == 0 else None
try:
    for step in range(24):
        loss = model(torch.ones(4, 4)).sum()
        loss.backward()
        optimizer.step()
        otel_ddp.log({"loss": loss}, step=step)
    if rank == 0:
        with torch.no_grad(), run.phase("eval"):
            model.module(torch.ones(4, 4))
        with run.phase("checkpoint"):
            pass
        otel_ddp.init().finish()
        again = otel_ddp.init()
    total = torch.ones(1)
    dist.all_reduce(total)
    group = dist.distributed_c10d._get_default_group()
    counted = group._get_sequence_number_for_group()
finally:
    dist.destroy_process_group()
if rank == 0:
    again.log({"after": total})
    again.finish()
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump([counted, total.item()], file)
"""


@pytest.fixture(scope="module")
def told() -> tuple[list[Any], list[dict[str, Any]]]:
    """What each rank counted, and what is known of the processes that had a run."""
    with Node(OTEL_DDP_AGENT="off", OTEL_DDP_SAMPLE_STEPS="1") as node:
        ranks = [
            node.warm(
                *("-c", TRAIN),
                env={"FOLDER": str(node.root), "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"},
            )
            for rank in ("0", "1")
        ]
        for each in ranks:
            finished(each)
        counted = [json.loads((node.root / f"{rank}.json").read_text()) for rank in (0, 1)]
        return counted, node.processes()


def test_rank_0_alone_may_have_a_run_because_we_do_no_collective(
    told: tuple[list[Any], list[dict[str, Any]]],
) -> None:
    (first, total), (second, other_total) = told[0]

    assert first == second > 24
    assert total == other_total == 2.0


def test_a_run_may_end_before_its_process_group_or_after_it(
    told: tuple[list[Any], list[dict[str, Any]]],
) -> None:
    # The first one ended before the last collective, the second one when there was no group left.
    ended = [(each["rank"], each["world_size"], each["state"]) for each in told[1]]

    assert ended == [(0, 2, "finished")] * 2


def test_a_store_that_does_not_answer_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process_group, "_LONGEST_WAIT_S", 0.05)
    answers = threading.Event()

    class Silent:
        def compare_set(self, *_: str) -> bytes:
            answers.wait(30)
            return b"too late"

    found, process = GroupFacts(0, 2, None), resolve(env={"RANK": "0", "WORLD_SIZE": "2"})
    assert process.wants_agreement
    said = process_group._within_limit(Silent(), found, process, seeks_lead=True)

    assert said == found
    assert caplog.messages == ["The process group's store did not answer within 0.05 s."]
    answers.set()
    for each in threading.enumerate():
        if each.name == "otel-ddp-agree":
            each.join()


# -- a process that learns its rank after its run was opened: from hooks, and now and then


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How often a process group was asked; one that a test has made is taken down."""
    found: list[int] = []
    facts = process_group.facts

    def counted(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return facts(*args, **kwargs)

    monkeypatch.setattr(process_group, "facts", counted)
    yield found
    dist.destroy_process_group()


def second_of_two() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)


def place_of(place: Here) -> tuple[Any, ...]:
    who = place.only().identity
    return who["global_rank"], who["world_size"], who["settled"]


def test_a_lone_process_that_joins_others_says_so_when_its_first_step_begins(
    place: Here, asked: list[int]
) -> None:
    model = nn.Linear(4, 1)
    otel_ddp.instrument(model)
    assert place_of(place) == (0, 1, True)

    second_of_two()
    loss = model(INPUT).sum()

    assert place_of(place) == (1, 2, True)
    loss.backward()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 30)
    assert asked == [1]


def test_a_process_that_only_logs_is_asked_every_few_seconds_and_not_at_each_value(
    place: Here, asked: list[int]
) -> None:
    run = otel_ddp.init()
    run.log({"loss": 1.0})
    second_of_two()
    for _ in range(3):
        run.log({"loss": 1.0})
    assert (place_of(place), asked) == ((0, 1, True), [])

    assert run._records is not None
    run._records.recorder.gate.check_due_ns = 0
    run.log({"loss": 1.0})

    assert (place_of(place), asked) == ((1, 2, True), [1])


def test_a_process_whose_variables_say_it_is_alone_stays_alone(
    place: Here, asked: list[int]
) -> None:
    model = nn.Linear(4, 1)
    otel_ddp.init(global_rank=0, world_size=1)
    otel_ddp.instrument(model)

    second_of_two()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)

    assert (place_of(place), asked) == ((0, 1, True), [])
