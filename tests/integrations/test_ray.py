"""Ray Train on two workers: their run has their steps and the end of their function."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from extras import needed
from integrations.launch import snippet
from node import Node, until

BEGIN = """
import sys
import ray, ray.train.torch, torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
"""
WITHOUT_A_LINE = """
def train_loop(config):
    model = prepare_model(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss = model(torch.ones(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if config["raises"]:
        raise ValueError("no more data")
"""
OF_THE_PAGE = """
def build(config):
    return torch.nn.Linear(4, 1)

def train_epoch(model):
    loss = model(torch.ones(8, 4)).square().mean()
    loss.backward()
    return loss.item()
"""
FIT = """
ray.init(num_cpus=2, include_dashboard=False)
TorchTrainer(
    train_loop,
    train_loop_config={"epochs": 2, "raises": "raises" in sys.argv},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="experiment", storage_path=sys.argv[1]),
).fit()
"""
RAY = {"RAY_TRAIN_V2_ENABLED": "1", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.mark.stress
def test_the_function_of_the_page_is_a_run_of_both_workers(tmp_path: Path) -> None:
    needed("ray", "ray")
    (tmp_path / "train.py").write_text(BEGIN + OF_THE_PAGE + snippet("Ray Train") + FIT)
    with Node() as node:
        ran = node.start(sys.executable, str(tmp_path / "train.py"), str(tmp_path), env=RAY)
        said, _ = ran.communicate(timeout=900)
        assert ran.returncode == 0, said

        until(lambda: len(node.series("training_scalar", name="loss")) == 2, "the loss of each")
        assert [each["state"] for each in node.processes()] == ["finished"] * 2


@pytest.mark.stress
@pytest.mark.parametrize(("how", "state"), [("returns", "finished"), ("raises", "failed")])
def test_the_run_of_its_workers_ends_as_the_function(tmp_path: Path, how: str, state: str) -> None:
    needed("ray", "ray")
    (tmp_path / "train.py").write_text(BEGIN + WITHOUT_A_LINE + FIT)
    with Node() as node:
        ran = node.start(
            *(sys.executable, "-m", "otel_ddp", "run", "--", sys.executable),
            *(str(tmp_path / "train.py"), str(tmp_path), how),
            env=RAY,
        )
        said, _ = ran.communicate(timeout=900)
        assert bool(ran.returncode) == (how == "raises"), said

        until(lambda: {each["state"] for each in node.processes()} == {state}, "the end")
        ranks = {each["rank"]: each for each in node.processes()}

        def told(metric: str, **labels: str) -> dict[str, float]:
            return {found["rank"]: value for found, value in node.series(metric, **labels)}

        # The agent tells what it has read a moment after journals say it.
        until(lambda: told("training_steps_total") == {"0": 4.0, "1": 4.0}, "all steps")
        sentences = [each["sentence"] for each in (*node.told().past, *node.told().verdicts)]

    if how == "raises":
        assert {each["reason"] for each in ranks.values()} == {"ValueError: no more data"}
    else:
        assert [each for each in sentences if "left without" in each or "killed" in each] == []
