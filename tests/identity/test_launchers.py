"""Who a process is, asked in real processes of real launchers."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tools.stack.server import free_port

import warm
from node import Node, finished

pytest.importorskip("torch")

WORKER = '''
"""Say who this process is, before and, where asked, after init_process_group."""
import json, os, sys
from pathlib import Path
from otel_ddp.identity import identity

def join(tell):
    import torch.distributed as dist
    if "fail" not in sys.argv:
        return dist.init_process_group("gloo", **tell)
    # After a restart, gloo of PyTorch 2.15 may find the addresses of the attempt before.
    from torch.testing._internal.distributed import fake_pg
    store, rank, world_size = next(dist.rendezvous("env://"))
    dist.init_process_group("fake", store=store, rank=rank, world_size=world_size)

def report(directory, tell, group=False):
    before, lead = identity.resolve(), None
    after = before
    if group:
        import torch.distributed as dist
        from otel_ddp.torch import process_group
        join(tell)
        facts = process_group.facts(before, seeks_lead=True)
        after, lead = identity.settle(before, facts), facts.lead
        dist.barrier()
        dist.destroy_process_group()
    said = {"before": before.to_dict(), "after": after.to_dict(), "lead": lead and lead.as_json()}
    Path(directory, f"{os.getpid()}.json").write_text(json.dumps(said))

if __name__ == "__main__":
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    report(sys.argv[1], {}, group="group" in sys.argv)
    if "fail" in sys.argv and attempt == "0":
        sys.exit(3)
'''

SPAWNER = """
import sys
import torch.multiprocessing as mp
from worker import report

def child(index, directory, store):
    tell = {"init_method": f"file://{store}", "rank": index, "world_size": 2}
    if not store:
        import os
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[4])
        tell = {"rank": index, "world_size": 2}
    report(directory, tell, group=True)

if __name__ == "__main__":
    mp.spawn(child, (sys.argv[1], ""), nprocs=2)
    mp.spawn(child, (sys.argv[2], sys.argv[3]), nprocs=2)
"""


def torchrun(node: int = 0) -> tuple[str, str, str]:
    """Torch is imported already, but not in the workers that it starts."""
    return (warm.python(node).executable, "-m", "torch.distributed.run")


def all_warm(node: int = 0) -> tuple[str, ...]:
    """What stands before a command whose workers are to have torch imported already, too."""
    return ("env", *(f"{name}={value}" for name, value in warm.python(node).env.items()))


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "spawner.py").write_text(SPAWNER)
    return tmp_path


def launch(scripts: Path, *commands: Sequence[str | Path]) -> None:
    """Run commands at the same time, to their ends."""
    with Node(GLOO_SOCKET_IFNAME="lo") as node:
        here = ("/usr/bin/env", "-C", str(scripts))
        for each in [node.start(*here, *map(str, command)) for command in commands]:
            finished(each)


def said(directory: Path, when: str = "after") -> list[dict[str, Any]]:
    """What the workers of one launch said, by rank."""
    told = [json.loads(file.read_text())[when] for file in directory.glob("*.json")]
    return sorted(told, key=lambda each: -1 if each["global_rank"] is None else each["global_rank"])


def leads(directory: Path) -> dict[int, list[dict[str, Any]]]:
    """What the workers of each attempt know of their lead."""
    found: dict[int, list[dict[str, Any]]] = {}
    for file in directory.glob("*.json"):
        told = json.loads(file.read_text())
        found.setdefault(told["after"]["restarts"], []).append(told["lead"])
    return found


def places(told: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    names = ("global_rank", "local_rank", "world_size", "node_rank", "nodes")
    return [tuple(each[name] for name in names) for each in told]


def runs(*tolds: list[dict[str, Any]]) -> list[set[str]]:
    return [{each["run"] for each in told} for told in tolds]


def directories(scripts: Path, *names: str) -> list[Path]:
    paths = [scripts / name for name in names]
    for path in paths:
        path.mkdir()
    return paths


def test_workers_of_a_launcher_on_one_node_share_a_settled_run(scripts: Path) -> None:
    standalone, plain, wrapped, legacy, lone, lone_too = directories(
        scripts, "standalone", "plain", "wrapped", "legacy", "lone", "lone_too"
    )
    two = "--nproc-per-node=2"
    # A shell between torchrun and each worker, which is then its parent.
    shell = ("sh", "-c", f'{sys.executable} worker.py "$0"; exit $?')

    launch(
        scripts,
        (*torchrun(), "--standalone", two, "worker.py", standalone),
        (*torchrun(), f"--master-port={free_port()}", two, "worker.py", plain),
        (*torchrun(), f"--master-port={free_port()}", two, "--no-python", *shell, wrapped),
        (
            *(warm.python().executable, "-Wignore", "-m", "torch.distributed.launch"),
            *(f"--master-port={free_port()}", two, "--use-env", "worker.py", legacy),
        ),
        (sys.executable, "worker.py", lone),
        (sys.executable, "worker.py", lone_too),
    )

    pairs = [said(each) for each in (standalone, plain, wrapped, legacy)]
    alone = [said(each) for each in (lone, lone_too)]

    names = runs(*pairs, *alone)
    assert [len(each) for each in names] == [1] * 6
    assert len(set.union(*names)) == 6
    assert [places(each) for each in pairs] == [[(0, 0, 2, 0, 1), (1, 1, 2, 0, 1)]] * 4
    assert [places(each) for each in alone] == [[(0, 0, 1, 0, 1)]] * 2
    everyone = [each for told in (*pairs, *alone) for each in told]
    assert all(each["run_settled"] and each["rank_settled"] for each in everyone)
    assert {each["launcher"] for told in pairs for each in told} == {"torchrun"}
    assert {each["launcher"] for told in alone for each in told} == {"lone"}


def test_spawned_processes_settle_with_their_process_group(scripts: Path) -> None:
    by_address, by_file = directories(scripts, "by_address", "by_file")

    launch(
        scripts,
        (
            *(*all_warm(), warm.python().executable, scripts / "spawner.py", by_address, by_file),
            *(scripts / "store", str(free_port())),
        ),
    )

    before = [said(each, "before") for each in (by_address, by_file)]
    after = [said(each) for each in (by_address, by_file)]

    first, second = runs(*after)
    assert (len(first), len(second)) == (1, 1)
    assert first != second
    assert len(set.union(*runs(*before))) == 1
    early = {(each["global_rank"], each["run_settled"]) for told in before for each in told}
    assert early == {(None, False)}
    assert places(after[0]) == [(0, 0, 2, None, None), (1, 1, 2, None, None)]
    # A file tells no one on which machines the ranks are.
    assert places(after[1]) == [(0, None, 2, None, None), (1, None, 2, None, None)]


def torchruns(
    directory: Path, port: int, nodes: Sequence[int], *more: str
) -> list[tuple[str | Path, ...]]:
    """A torchrun for each node, of one worker; no two workers have the same parent."""
    where = ("--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1", f"--master-port={port}")
    return [
        (
            *(*all_warm(node), *torchrun(node), *where, f"--node-rank={rank}", *more),
            *("worker.py", directory, "group", *(("fail",) if more else ())),
        )
        for rank, node in enumerate(nodes)
    ]


def test_a_restart_of_torchrun_keeps_the_name_and_has_another_lead(scripts: Path) -> None:
    (directory,) = directories(scripts, "restarted")

    launch(scripts, *torchruns(directory, free_port(), (0, 1), "--max-restarts=1"))

    assert len(said(directory)) == 4
    assert [len(each) for each in runs(said(directory))] == [1]
    first, second = (found for _, found in sorted(leads(directory).items()))
    (one,), (other,) = ({each["secret"] for each in found} for found in (first, second))
    assert one != other
    # The ranks of an attempt agree, wherever rank 0 is.
    assert [len({tuple(each["ports"]) for each in found}) for found in (first, second)] == [1, 1]
    assert all("127.0.0.1" in each["hosts"] for each in (*first, *second))
