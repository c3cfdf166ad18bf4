"""Programs without a line of ours, started as users start them, below `otel-ddp run`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from tools.stack.server import free_port

from conftest import Here, Journal
from extras import needed
from node import Node, finished
from otel_ddp.vocabulary import catalog

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCH = ("-m", "torch.distributed.launch", "--nproc-per-node", "2")
# As torchrun, beneath: Accelerate has no launcher of its own for several processes without GPUs.
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2")
PHASES = ("forward", "backward", "optimizer")


def journals(*command: str, env: dict[str, str] | None = None) -> list[Journal]:
    """What `otel-ddp run` has recorded of a Python program, by rank."""
    more = {"CUDA_VISIBLE_DEVICES": "", "MASTER_PORT": str(free_port()), "OTEL_DDP_AGENT": "off"}
    with Node(**more, **(env or {})) as node:
        node.env["OUTPUT"] = str(node.root)
        ours = (sys.executable, "-m", "otel_ddp", "run", "--")
        finished(node.start(*ours, sys.executable, *command))
        place = node.place.directory
        found = Here(place).read() if place.exists() else []
    return sorted(found, key=lambda each: each.identity["global_rank"])


@pytest.mark.stress
@pytest.mark.parametrize(
    ("launcher", "program", "steps"),
    [
        ((), "from_swanlab/train_before.py", 200),
        (TORCHRUN, "from_wandb/train_before.py", 96),
        (LAUNCH, "from_wandb_guide/train_before.py", 80),
        (ACCELERATE, "from_em/train_before.py", 96),
        (TORCHRUN, "trainer_ddp/train_before.py", None),
    ],
)
def test_each_program_that_people_bring_is_one_run_of_two_measured_ranks(
    launcher: tuple[str, ...], program: str, steps: int | None
) -> None:
    if launcher is LAUNCH:
        launcher = (*launcher, "--master-port", str(free_port()))
    if launcher is ACCELERATE:
        needed("accelerate", "dev")
        launcher = (*launcher, "--main_process_port", str(free_port()))

    ranks = journals(*launcher, str(EXAMPLES / program))

    assert [each.identity["global_rank"] for each in ranks] == [0, 1]
    (run,) = {each.identity["run"] for each in ranks}
    assert re.fullmatch("[a-z]+-[a-z]+-[a-z0-9]{5}", run)
    first, second = (each.total(catalog.TRAINING_STEPS) for each in ranks)
    assert first == second
    # The trainer stops early, after some epoch.
    assert first == steps if steps else first % 16 == 0
    assert first
    for rank in ranks:
        for phase in PHASES:
            assert rank.total(catalog.TRAINING_PHASE_TIME, phase=phase) > 0, phase


def test_a_script_for_wandb_has_its_curves_here_on_the_rank_that_logs(tmp_path: Path) -> None:
    needed("wandb", "frameworks")
    env = {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "HOME": str(tmp_path)}

    first, second = journals(*TORCHRUN, str(EXAMPLES / "from_wandb/train_wandb.py"), env=env)

    for rank in (first, second):
        assert rank.total(catalog.TRAINING_STEPS) == 96
    # W&B counts from 0. Of rank 1 the loss is what we read.
    for name in ("loss", "accuracy"):
        assert first.steps_of(name) == list(range(96))
    assert second.steps_of("accuracy") == []
    assert first.identity["name"] == "baseline"
    assert (first.config["lr"], first.config["classes"]) == (0.02, 4)
    # Rank 1 has told nobody of a group, and it is in the same run.
    assert first.config["group"] == "my-experiment"
    assert {(each.identity["group"], each.identity["run"]) for each in (first, second)} == {
        ("", first.identity["run"])
    }


POOL = """
import multiprocessing, sys
import torch


def work(lr):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for _ in range(20):
        model(torch.ones(8, 4)).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    with multiprocessing.get_context(sys.argv[1]).Pool(2) as pool:
        pool.map(work, [0.1, 0.01, 0.001], chunksize=1)
        pool.close()
        pool.join()
"""


@pytest.mark.stress
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_each_task_of_a_pool_is_a_run(method: str, tmp_path: Path) -> None:
    (tmp_path / "sweep.py").write_text(POOL)

    runs = journals(str(tmp_path / "sweep.py"), method)

    assert len({each.identity["run"] for each in runs}) == 3
    assert len({each.identity["group"] for each in runs}) == 1
    assert [each.total(catalog.TRAINING_STEPS) for each in runs] == [20, 20, 20]
