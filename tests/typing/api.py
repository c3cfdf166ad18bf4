"""What a user would write: type-checked, never run."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from decimal import Decimal
from pathlib import Path

import numpy as np
import torch
from typing_extensions import assert_type

import otel_ddp
from otel_ddp import ConfigError, Identity, MissingDependency, OtelDdpError, Run


def choose(who: Identity) -> bool:
    return who.global_rank is not None and who.global_rank % 8 == 0


def train(model: torch.nn.Module, args: argparse.Namespace) -> None:
    run = otel_ddp.instrument(model, strategy="node", group="ablation", job_type="train")
    assert_type(run, Run)
    assert_type(run.run, str)
    assert_type(run.identity.global_rank, int | None)

    assert_type(otel_ddp.config(args), argparse.Namespace)
    settings: dict[str, object] = {"lr": 0.1, "model": {"layers": 2}}
    assert_type(run.config(settings)["lr"], object)
    for step in range(10):
        loss = torch.zeros(())
        run.log({"loss": loss, "lr": 0.1, "scale": np.float32(1), "share": Decimal("0.5")})
        run.log({"loss": 0.5}, step=step, epoch=step / 10, split="val")
        otel_ddp.log(OrderedDict(loss=0.5), step=step, epoch=1)
    with run.phase("eval"), run.span("load", shard=3, name="a"):
        run.event("lr drop", factor=0.1)
    with otel_ddp.phase("checkpoint"), otel_ddp.span("save"):
        otel_ddp.event("saved", path="/checkpoints")
    run.alert("loss rises")
    otel_ddp.alert("loss rises", "it is 3.2", level="warn")
    run.artifact("out/model.pt", name="model", type="model", metadata={"loss": 0.5})
    otel_ddp.artifact(Path("data"), direction="input")
    run.finish()
    run.finish("failed", reason="no more data")
    otel_ddp.finish()


def before_there_is_a_model() -> None:
    assert_type(otel_ddp.instrument(), Run)
    assert_type(otel_ddp.instrument(strategy="all", group="sweep"), Run)


def open_runs() -> None:
    otel_ddp.init()
    otel_ddp.init("main", group="g", run="r", project="p", name="n", description="d", node="a")
    otel_ddp.init(tags="a,b", best={"wer": "min", "speed": "max", "aux_loss": "none"})
    otel_ddp.instrument(torch.nn.Linear(1, 1), tags=["a", "b"])
    otel_ddp.init(strategy=choose, global_rank=0, local_rank=0, world_size=1, config={"lr": 0.1})
    with otel_ddp.init() as run:
        run.log({"loss": 0.5})
    assert_type(otel_ddp.current(), Run | None)


def wrong(run: Run) -> None:
    # Each of these is an error today; an ignore that is not needed is one as well.
    run.log({1: 0.5})  # type: ignore[dict-item]
    run.log([("loss", 0.5)])  # type: ignore[arg-type]
    run.log({"loss": 0.5}, 1)  # type: ignore[call-arg]
    run.log({"loss": 0.5}, step="1")  # type: ignore[arg-type]
    run.log({"loss": 0.5}, stepp=1)  # type: ignore[call-arg]
    otel_ddp.init(group=1)  # type: ignore[arg-type]
    otel_ddp.init(tags=[1])  # type: ignore[list-item]
    otel_ddp.init(best={"wer": "lowest"})  # type: ignore[dict-item]
    run.artifact("out", direction="up")  # type: ignore[arg-type]
    otel_ddp.init(grup="g")  # type: ignore[call-arg]
    otel_ddp.instrumment(None)  # type: ignore[attr-defined]


def catch() -> None:
    try:
        otel_ddp.init()
    except (ConfigError, MissingDependency) as error:
        ours: OtelDdpError = error
        theirs: ValueError | ImportError = error
        raise ours from theirs
