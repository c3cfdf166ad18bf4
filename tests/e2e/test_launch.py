"""Two nodes of two ranks on one host, launched by torchrun, under each strategy."""

from __future__ import annotations

import socket

from tools.stack.server import free_port

import warm
from node import Node, finished, until

# One launch shows all strategies: a run of each, one after the other.
TRAIN = """
import torch.distributed as dist
import otel_ddp

dist.init_process_group("gloo")
for strategy in ("all", "node", "main"):
    run = otel_ddp.init(strategy, group=strategy)
    run.log({"loss": 1.0 + dist.get_rank()}, step=1)
    with run.phase("eval"):
        pass
    run.finish()
dist.destroy_process_group()
"""


def test_recorded_ranks_are_four_two_and_one_and_all_have_one_run() -> None:
    with Node() as node:
        script = node.root / "train.py"
        script.write_text(TRAIN)
        port = free_port()
        launches = [
            node.start(
                *(warm.python(rank).executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--nproc-per-node", "2", "--node-rank", str(rank)),
                *("--master-addr", "127.0.0.1", "--master-port", str(port)),
                str(script),
                env=warm.python(rank).env,
            )
            for rank in range(2)
        ]
        for launch in launches:
            finished(launch)

        def ended() -> bool:
            return len(node.processes()) == 12 and all(
                each["state"] == "finished" for each in node.processes()
            )

        until(ended, "all ranks to end")
        until(
            lambda: [value for _, value in node.series("training_state")] == [2.0] * 7,
            "the states of all exported ranks",
        )
        host = socket.gethostname()

        def recorded(strategy: str) -> list[tuple[str, str, str]]:
            found = node.series("training_scalar", name="loss", group=strategy)
            return sorted((each["rank"], each["local_rank"], each["node"]) for each, _ in found)

        every = recorded("all")
        nodes = {each[2] for each in every}
        assert len(nodes) == 2
        assert host in nodes
        assert [each[:2] for each in every] == [("0", "0"), ("1", "1"), ("2", "0"), ("3", "1")]
        # Ranks 0 and 1 are on one node, 2 and 3 on the other.
        assert every[0][2] == every[1][2] != every[2][2] == every[3][2]
        assert recorded("node") == [every[0], every[2]]
        assert recorded("main") == [every[0]]
        runs = {found["run"] for found, _ in node.series("training_scalar")}
        assert len(runs) == 1
        # Every rank has its journal under every strategy.
        by_strategy = [each["strategy"] for each in node.processes()]
        assert sorted(by_strategy) == ["all"] * 4 + ["main"] * 4 + ["node"] * 4
