"""How ranks on several nodes agree on their lead, through the store of their process group."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

from node import Node, finished
from otel_ddp.identity import lead
from otel_ddp.identity.identity import GroupFacts, resolve
from otel_ddp.identity.lead import addresses_here
from otel_ddp.journal.reader import JournalReader
from otel_ddp.torch import process_group
from shortages import no_threads

# Importing it makes the backend known.
assert fake_pg

LEAD = f"{process_group.LEAD_KEY}///made"
RECORD = lead.Lead("ab" * 32, ("node-0",), (23456,))
# One rank of two that were started by hand, on hosts of which nothing is known.
TWO_BY_HAND = {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}
ONE_NODE = {**TWO_BY_HAND, "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def rank() -> int:
    """This process's."""
    return 1


@pytest.fixture
def store(rank: int) -> Iterator[Any]:
    """The store of a group of two."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=2)
    yield dist.distributed_c10d._get_default_store()
    dist.destroy_process_group()


def asked(env: dict[str, str], rank: int, *, seeks_lead: bool = True) -> GroupFacts:
    process = resolve(env={**env, "RANK": str(rank)}, host=f"node-{rank}", make_id=lambda: "made")
    found = process_group.facts(process, seeks_lead=seeks_lead)
    assert found is not None
    return found


def test_a_rank_that_comes_before_rank_0_has_the_masters_name_and_later_rank_0s_hosts(
    store: Any,
) -> None:
    os.environ["MASTER_ADDR"] = "10.0.0.5"
    early = asked(TWO_BY_HAND, 1).lead

    (said,) = [lead.parse_text(store.get(LEAD).decode())]
    assert early == said.with_hosts(["10.0.0.5"])
    assert said.hosts == ()

    store.set(LEAD, said.with_hosts(["node-0", "10.0.0.9"]).as_text())
    assert asked(TWO_BY_HAND, 1).lead == said.with_hosts(["10.0.0.5", "node-0", "10.0.0.9"])


def test_nodes_that_count_restarts_differently_have_one_lead(store: Any) -> None:
    found = []
    for restarts in range(3):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(restarts)
        found.append(asked(TWO_BY_HAND, 1).lead)

    assert found == [lead.parse_text(store.get(LEAD).decode())] * 3


@pytest.mark.parametrize("rank", [0])
@pytest.mark.parametrize(
    ("before", "keeps"),
    [
        ("", False),
        (lead.propose().as_text(), True),
        # Of a rank 0 of the attempt before: here, and on a node whose agent may still listen.
        (RECORD._replace(hosts=("node-0", *addresses_here())).as_text(), True),
        (RECORD._replace(hosts=("node-9",)).as_text(), False),
        ('{"secret": 5}', False),
    ],
)
def test_rank_0_says_where_it_is_whatever_it_finds_there(
    before: str, keeps: bool, store: Any
) -> None:
    if before:
        store.set(LEAD, before)

    found = asked(TWO_BY_HAND, 0).lead

    here = ("node-0", *addresses_here())
    assert found == lead.parse_text(store.get(LEAD).decode())
    assert found is not None
    assert found.hosts == here
    assert keeps == (before[:80] == found.as_text()[:80])


def test_what_is_no_lead_leaves_another_rank_without_one_and_with_its_name(store: Any) -> None:
    store.set(LEAD, "[" * 5000)

    assert asked(TWO_BY_HAND, 1) == GroupFacts(1, 2, "made")


def test_a_rank_that_can_start_no_thread_agrees_with_no_other(store: Any) -> None:
    with no_threads():
        found = asked(TWO_BY_HAND, 1)

    assert found == GroupFacts(1, 2, None)
    assert store.num_keys() == 0


def test_ranks_of_one_node_exchange_their_name_alone(store: Any) -> None:
    assert asked(ONE_NODE, 1) == GroupFacts(1, 2, "made")
    assert store.num_keys() == 1


def test_each_run_of_the_same_ranks_has_a_lead_of_its_own(store: Any) -> None:
    runs = (
        {"OTEL_DDP_RUN": "a"},
        {"OTEL_DDP_RUN": "b"},
        {"OTEL_DDP_RUN": "b", "OTEL_DDP_GROUP": "g"},
        {"OTEL_DDP_RUN": "b/c", "OTEL_DDP_GROUP": "g"},
        {"OTEL_DDP_RUN": "c", "OTEL_DDP_GROUP": "g/b"},
    )

    found = [asked(TWO_BY_HAND | each, 1).lead for each in (*runs, *runs)]

    assert len(set(found)) == len(runs)
    assert found[: len(runs)] == found[len(runs) :]


def test_a_run_that_is_named_and_has_no_lead_to_seek_asks_nothing(store: Any) -> None:
    named = {**TWO_BY_HAND, "OTEL_DDP_RUN": "named"}

    assert asked(named, 1, seeks_lead=False) == GroupFacts(1, 2, None)
    assert store.num_keys() == 0


FORKED = """
import os, sys
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
import otel_ddp

def keys_after_a_run():
    otel_ddp.init().finish()
    return dist.distributed_c10d._get_default_store().num_keys()

def join_others():
    dist.init_process_group("fake", store=dist.HashStore(), rank=1, world_size=2)

otel_ddp.init(run="parent")
join_others()
if os.fork():
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
of_parents = keys_after_a_run()
dist.destroy_process_group()
join_others()
print("keys:", of_parents, keys_after_a_run(), flush=True)
os._exit(0)
"""


def test_a_forked_child_does_not_speak_on_its_parents_store() -> None:
    with Node(OTEL_DDP_AGENT="off") as node:
        out = finished(node.warm("-c", FORKED))

    assert "keys: 0 2\n" in out


TRAIN = """
import os, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

folder, rank, opens = os.environ["FOLDER"], int(os.environ["RANK"]), sys.argv[1]
if opens == "early":
    run = otel_ddp.init(run="named")
dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
if rank == 1 and opens == "late":
    run = otel_ddp.init(run="named")
print("is here", flush=True)
if rank == 0:
    sys.stdin.readline()
model = DistributedDataParallel(nn.Linear(4, 4))
run = otel_ddp.instrument(model, run="named")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(3):
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
run.finish()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("opens", ["early", "late"])
def test_ranks_know_their_lead_after_their_first_step_whoever_comes_first(opens: str) -> None:
    def told() -> dict[int, lead.Lead | None]:
        readers = [JournalReader(each) for each in node.place.journals()]
        found = {
            each.identity["global_rank"]: lead.parse(each.facts.get(lead.FACT)) for each in readers
        }
        for each in readers:
            each.close()
        return found

    with Node(OTEL_DDP_AGENT="off") as node:
        more = {"FOLDER": str(node.root), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
        ranks = [
            node.warm("-c", TRAIN, opens, env={**more, "RANK": str(rank)}) for rank in range(2)
        ]
        for each in ranks:
            assert each.stdout is not None
            # Warnings of torch's may come first.
            assert "is here\n" in iter(each.stdout.readline, "")
        before = told()
        assert ranks[0].stdin is not None
        ranks[0].stdin.write("\n")
        ranks[0].stdin.flush()
        for each in ranks:
            finished(each)
        after = told()

    first = after[0]
    assert first is not None
    assert first.hosts == (socket.gethostname(), *addresses_here())
    assert after == {0: first, 1: first}
    # A file tells no host, so a rank that comes first knows of none.
    assert before == ({0: None, 1: None} if opens == "early" else {1: first._replace(hosts=())})
