"""A run that is killed and goes on from a checkpoint: its attempts, and what its time went to."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import documents
import warm
from extras import needed
from node import Node, finished, until
from otel_ddp.history.directory import histories
from otel_ddp.history.goodput import Goodput, goodput_of
from otel_ddp.history.reader import History
from otel_ddp.history.whole_run import WholeRun
from otel_ddp.vocabulary.words import TIME_CAUSES

pytestmark = pytest.mark.timed

# It saves at 60, loses rank 1 after step 99, and goes on from 60 to the end. By its own clock each
# rank notes when each step was done.
LOOP = """
import json, os, sys, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import otel_ddp

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
saved = folder / "saved"
first = 60 if saved.exists() else 0
model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
# It counts its steps from 1, and the program logs them from 0.
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if first:
    optimizer.load_state_dict(torch.load(saved))
done = []
optimizer.register_step_post_hook(lambda *_: done.append(time.time()))
run = otel_ddp.instrument(model, group="g", run="again")
for step in range(first, 200):
    time.sleep(0.02)
    loss = model(torch.ones(8, 64)).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        run.log({"loss": float(loss)}, step=step)
    if step == 59 and rank == 0:
        with run.phase("checkpoint"):
            time.sleep(0.5)
            torch.save(optimizer.state_dict(), saved)
    if step == 99 and not first or step == 199:
        (folder / f"{rank}.{first}").write_text(json.dumps(done))
    if step == 99 and not first:
        dist.barrier()
        if rank == 1:
            os._exit(3)
run.finish()
dist.destroy_process_group()
"""

TRANSFORMERS = """
import os
import sys
import time

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from otel_ddp.integrations.transformers import OtelDdpCallback


class Tiny(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(4, 1)
        self.post_init()

    def forward(self, x, labels=None):
        out = self.layer(x).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


class Killed(TrainerCallback):
    def on_step_end(self, arguments, state, control, **more):
        time.sleep(0.02)
        if state.global_step == 25 and last is None:
            os._exit(3)


arguments = TrainingArguments(
    output_dir=sys.argv[1],
    report_to="none",
    max_steps=40,
    save_steps=15,
    logging_steps=5,
)
last = get_last_checkpoint(sys.argv[1])
train_set = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(64)]
model, callbacks = Tiny(PretrainedConfig()), [OtelDdpCallback(run="again"), Killed()]
trainer = Trainer(model, arguments, train_dataset=train_set, callbacks=callbacks)
trainer.train(resume_from_checkpoint=last)
"""

LIGHTNING = """
import os
import sys
import time
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from otel_ddp.integrations.lightning import OtelDdpCallback, OtelDdpLogger


class Tiny(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, number):
        loss = self.layer(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *more):
        time.sleep(0.02)
        if self.trainer.global_step == 25 and last is None:
            os._exit(3)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


found = sorted(Path(sys.argv[1]).glob("*.ckpt"))
last = str(found[-1]) if found else None
trainer = L.Trainer(
    max_steps=40,
    accelerator="cpu",
    logger=OtelDdpLogger(run="again"),
    callbacks=[OtelDdpCallback(run="again"), ModelCheckpoint(sys.argv[1], every_n_train_steps=15)],
    enable_progress_bar=False,
    log_every_n_steps=5,
)
trainer.fit(Tiny(), DataLoader(TensorDataset(torch.randn(64, 4)), 8), ckpt_path=last)
"""


def asked(node: Node, *arguments: str) -> str:
    """What the command says of the newest run."""
    return finished(node.start(sys.executable, "-m", "otel_ddp", "goodput", *arguments))


class Ran(NamedTuple):
    """Two attempts of one run."""

    goodput: Goodput
    node: dict[str, float]
    """By cause, on the node's endpoint."""
    loss: list[tuple[int, int]]
    """The steps of the logged loss, and how many values each has."""
    places: list[int]
    """The steps of rank 0."""
    total_s: float
    """From the start of the first launch to the end of the last."""


def run_twice(node: Node, *command: str) -> Ran:
    return launched(node, command, fails=(True, False))


def launched(node: Node, command: Sequence[str], fails: Sequence[bool]) -> Ran:
    """*fails*: of each launch, whether it does."""
    began = time.monotonic()
    for each in fails:
        process = node.start(*command)
        printed = process.communicate()[0]
        assert bool(process.returncode) == each, printed
    total_s = time.monotonic() - began

    def told() -> dict[str, float]:
        found = [(labels, v) for name, labels, v in node.scrape() if name == METRIC]
        return {labels["cause"]: value for labels, value in found if labels["run"] == "again"}

    def ended() -> Ran | None:
        with WholeRun([History(path) for path in histories(node.root / "history")]) as run:
            found = goodput_of(run)
            if found is None or found.attempts[-1].get("state") != "finished":
                return None
            counts = [(each.start, each.finite) for each in run.values.get(("loss", "train"), ())]
            places = [each.start for each in run.step_buckets["0"][2]]
        # Its endpoint is a second behind.
        by_cause = told()
        every = {**dict.fromkeys(TIME_CAUSES, 0.0), **found.seconds}
        same = by_cause == pytest.approx(every, abs=0.002)
        return Ran(found, by_cause, counts, places, total_s) if same else None

    return dict_of(until(ended, "the end of the second attempt"))


METRIC = "otel_ddp_run_time_seconds_total"


def dict_of(found: Any) -> Ran:
    assert isinstance(found, Ran)
    return found


def test_a_run_that_goes_on_from_a_checkpoint_is_one_run_and_its_time_adds_up(
    tmp_path: Path,
) -> None:
    program = tmp_path / "train.py"
    program.write_text(LOOP)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    with Node() as node, warm.with_imported("torch.distributed.run") as python:
        node.env |= python.env
        ran = run_twice(node, python.executable, *launcher, str(program), str(tmp_path))
        node.env["OTEL_DDP_GPU_HOUR_PRICE"] = "3600 EUR"
        said, in_words = json.loads(asked(node, "--json")), asked(node)
    documents.check("goodput", said)
    found = ran.goodput
    done = {
        (rank, first): json.loads((tmp_path / f"{rank}.{first}").read_text())
        for rank in (0, 1)
        for first in (0, 60)
    }
    own = {"kept": 0.0, "repeated": 0.0, "start": 0.0}
    for rank in (0, 1):
        before, after = done[rank, 0], done[rank, 60]
        own["kept"] += before[99] - before[0] + after[139] - after[39]
        own["repeated"] += after[39] - after[0]

    kept = {"productive", "data", "checkpoint", "late_rank"} & found.seconds.keys()
    assert sum(found.seconds[each] for each in kept) == pytest.approx(own["kept"], rel=0.02)
    assert found.seconds["repeated"] == pytest.approx(own["repeated"], rel=0.02)
    assert found.seconds["checkpoint"] == pytest.approx(0.5, rel=0.05)
    # Two ranks; the launcher's own time is nobody's before the first attempt and after the last.
    assert found.total_s < 2 * ran.total_s
    first, second = found.attempts
    assert (first["last_step"], second["first_step"], second["last_step"]) == (99, 60, 199)
    assert second["repeated_steps"] == 40
    # Its first new step begins when that before has ended.
    back_s = done[0, 60][39] - first["ended_ns"] / 1e9
    assert second["back_s"] == pytest.approx(back_s, abs=0.1)
    assert "exit code 3" in first["why"]
    # A euro a second.
    assert said["price"]["costs"]["repeated"] == pytest.approx(own["repeated"], abs=0.1)
    assert f"{found.share('productive'):.1%} of" in in_words
    assert "exit code 3" in in_words.splitlines()[-2]
    # The curve has each step once, and so has the picture of the phases.
    assert ran.loss == [(step, 1) for step in range(200)]
    assert ran.places == list(range(1, 201))


def test_an_attempt_that_torchrun_starts_again_is_one_of_the_same_run(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(LOOP)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    # Else PyTorch 2.15 has one store for all attempts: the second finds the first one's addresses.
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with Node(**env) as node, warm.with_imported("torch.distributed.run") as python:
        node.env |= python.env
        command = (python.executable, *torchrun, "--max-restarts", "1", str(program))
        ran = launched(node, (*command, str(tmp_path)), fails=[False])

    found = ran.goodput
    first, second = found.attempts
    assert (first["last_step"], second["first_step"], second["last_step"]) == (99, 60, 199)
    assert (first["repeated_steps"], second["repeated_steps"]) == (0, 40)
    assert {"productive", "repeated", "start", "between_attempts"} <= found.seconds.keys()
    # Both ranks were there from the first one's start to the last one's end, but for a moment.
    both_s = 2 * (second["ended_ns"] - first["began_ns"]) / 1e9
    assert sum(found.seconds.values()) == pytest.approx(both_s, abs=1)
    assert sum(map(found.share, found.seconds)) == pytest.approx(1)
    assert ran.places == list(range(1, 201))


@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_what_a_framework_does_twice_is_told(tmp_path: Path, framework: str) -> None:
    needed(framework, "frameworks")
    program, saved = tmp_path / "train.py", tmp_path / "saved"
    program.write_text({"transformers": TRANSFORMERS, "lightning": LIGHTNING}[framework])
    saved.mkdir()
    env = {"HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with Node(**env) as node:
        modules = {"transformers": "transformers.trainer", "lightning": "lightning.pytorch"}
        with warm.with_imported(modules[framework]) as python:
            node.env |= python.env
            ran = run_twice(node, python.executable, str(program), str(saved))

    first, second = ran.goodput.attempts
    assert (first["last_step"], second["last_step"]) == (25, 40)
    assert second["repeated_steps"] == 10
    assert ran.places == list(range(1, 41))
    assert {"productive", "repeated", "start", "between_attempts"} <= ran.goodput.seconds.keys()
