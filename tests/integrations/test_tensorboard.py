"""What TensorBoard's writers are given is recorded, in a run that the program has not opened."""

from __future__ import annotations

import _thread
import json
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import otel_ddp
from conftest import Here, Journal
from extras import needed
from integrations import programs
from node import Node, finished
from otel_ddp.integrations import tensorboard
from otel_ddp.run import for_frameworks


class SummaryWriter:
    """Stands in for the one of tensorboardX, and takes what that takes."""

    def add_scalar(
        self, tag: str, scalar_value: Any, global_step: Any = None, walltime: Any = None
    ) -> int:
        return len(tag)

    def add_scalars(self, main_tag: str, tag_scalar_dict: Any, global_step: Any = None) -> None:
        for name in tag_scalar_dict:
            assert name, "a scalar without a name"

    def add_hparams(self, hparam_dict: Any, metric_dict: Any) -> None:
        for name, value in metric_dict.items():
            self.add_scalar(name, value)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    class Fresh(SummaryWriter):
        add_scalar, add_scalars = SummaryWriter.add_scalar, SummaryWriter.add_scalars
        add_hparams = SummaryWriter.add_hparams

    module = ModuleType("tensorboardX.writer")
    module.SummaryWriter = Fresh  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    tensorboard.log_every_scalar()
    # A program may import both packages.
    tensorboard.log_every_scalar()
    yield Fresh()
    tensorboard._known.discard(Fresh)


def points(journal: Journal) -> list[tuple[str, float, int | None]]:
    return [
        (journal.names[number].text, value, call.step)
        for call in journal.calls
        for number, value in call.values
    ]


def test_its_values_have_its_steps_and_those_of_the_training_go_on(
    place: Here, writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_DDP_SAMPLE_STEPS", "1")
    writer.add_scalar("early", 1.0, 0)
    for_frameworks.instrument(run="one")
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)

    for step in range(1, 4):
        loss = model(torch.ones(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        assert writer.add_scalar("return", torch.tensor(step / 2), step * 128) == len("return")
        writer.add_scalar(tag="loss", scalar_value=7.0, global_step=step * 128)
    writer.add_scalars("score", {"a": 1, "b": 2.0}, 9)
    writer.add_hparams({"lr": 0.1, "net": "small"}, {"best": 0.5})
    otel_ddp.finish()

    journal = place.only()
    found = points(journal)
    logged = [each for each in found if each[0] not in ("learning_rate", "grad_norm")]
    assert logged == [
        *(each for n in (1, 2, 3) for each in (("return", n / 2, n * 128), ("loss", 7.0, n * 128))),
        *(("score/a", 1.0, 9), ("score/b", 2.0, 9)),
        ("best", 0.5, 3),
    ]
    assert [step for name, _, step in found if name == "learning_rate"] == [1, 2, 3]
    assert journal.config == {"lr": 0.1, "net": "small"}


def test_the_folders_of_writers_tell_their_values_apart(place: Here, writer: Any) -> None:
    def write(folder: str, tag: str = "loss") -> None:
        each = type(writer)()
        # Of torch, and of tensorboardX.
        setattr(each, "log_dir" if "x" in folder else "logdir", folder)
        each.add_scalar(tag, 1.0, 1)

    for_frameworks.instrument(run="one")
    for folder in ("runs/x/train", "runs/x/val", "runs/x/critic", "runs/x", "runs/y/eval"):
        write(folder)
    write("runs/x/train", "val_loss")
    write("runs/x/critic", "test/loss")
    otel_ddp.finish()

    journal = place.only()
    found = [journal.names[number] for call in journal.calls for number, _ in call.values]
    assert [(each.text, each.split) for each in found] == [
        *(("loss", "train"), ("loss", "val"), ("critic/loss", "train"), ("loss", "train")),
        *(("y/loss", "val"), ("val_loss", "val"), ("critic/test/loss", "test")),
    ]


def test_a_program_that_opens_its_run_says_by_itself_what_is_recorded(
    place: Here, writer: Any
) -> None:
    run = otel_ddp.init()
    writer.add_scalar("loss", 1.0, 1)
    writer.add_hparams({"lr": 0.1}, {})
    run.log({"loss": 2.0}, step=1)
    run.finish()

    assert points(place.only()) == [("loss", 2.0, 1)]
    assert place.only().config == {}


def test_what_is_no_number_is_no_error_and_an_error_of_the_writer_is_the_programs(
    place: Here, writer: Any
) -> None:
    for_frameworks.instrument(run="one")
    writer.add_scalar("loss", "blob", 1)
    writer.add_scalar("loss", 1.0, "one")
    with pytest.raises(AssertionError, match="without a name"):
        writer.add_scalars("loss", {"": 1.0}, 2)
    with pytest.raises(TypeError):
        writer.add_scalar("loss")
    otel_ddp.finish()

    assert [each[:2] for each in points(place.only())] == [("loss", 1.0)]


def test_a_thread_that_begins_with_the_method_has_no_error(
    place: Here, writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Value(float):
        """The thread lets go of it at its end."""

    raised: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: raised.append(str(args.exc_value)))
    for_frameworks.instrument(run="one")
    value, ended = Value(1.0), threading.Event()
    weakref.finalize(value, ended.set)

    _thread.start_new_thread(writer.add_scalar, ("loss", value, 1))
    del value

    assert ended.wait(10.0)
    otel_ddp.finish()
    assert raised == []
    assert points(place.only()) == [("loss", 1.0, 1)]


PLAIN = """
import torch
from torch.optim import SGD
from torch.utils.tensorboard import SummaryWriter
import tensorboardX

model = torch.nn.Linear(4, 1)
optimizer = SGD(model.parameters(), lr=0.1)
with SummaryWriter("one") as one, tensorboardX.SummaryWriter("other") as other:
    for step in range(1, 4):
        loss = model(torch.ones(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        one.add_scalar("Loss/train", loss, step)
        other.add_scalar("frames", step, step * 128)
    one.add_hparams({"lr": 0.1}, {"best": 0.5})
"""
LIGHTNING = """
from lightning.pytorch.loggers import TensorBoardLogger

trainer = L.Trainer(
    max_epochs=1, logger=TensorBoardLogger("."), log_every_n_steps=1, accelerator="cpu", devices=1,
    enable_progress_bar=False, enable_checkpointing=False,
)
trainer.fit(model, train_loader)
trainer.logger.experiment.add_scalar("own", 1.0, 5)
"""
TRANSFORMERS = """
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir="out", num_train_epochs=1, logging_steps=2, save_strategy="no",
    report_to="tensorboard",
)
Trainer(model, arguments, train_dataset=train_set).train()
"""
ACCELERATE = """
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=".")
accelerator.init_trackers("runs", config={"lr": 0.1})
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(1, 4):
    loss = model(torch.ones(8, 4)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    accelerator.log({"mine": loss.item()}, step=step)
accelerator.end_training()
"""


@pytest.mark.stress
@pytest.mark.parametrize(
    ("source", "counts"),
    [
        (PLAIN, {"Loss/train": 3, "frames": 3, "best": 1}),
        (programs.LIGHTNING + LIGHTNING, {"train_loss": 8, "batch": 8, "own": 1}),
        (programs.TRANSFORMERS + TRANSFORMERS, {"loss": 4, "train_runtime": 1, "train/loss": 0}),
        (ACCELERATE, {"mine": 3}),
    ],
    ids=["plain", "lightning", "transformers", "accelerate"],
)
def test_with_the_real_writers_each_value_is_there_once(
    tmp_path: Path, source: str, counts: dict[str, int]
) -> None:
    for package in ("tensorboard", "tensorboardX"):
        needed(package, "tensorboard")
    for package in ("lightning", "transformers", "accelerate"):
        needed(package, "frameworks")
    (tmp_path / "train.py").write_text(source)
    env = {
        **dict.fromkeys(("HOME", "TMPDIR"), str(tmp_path)),
        "ACCELERATE_USE_CPU": "true",
        "CUDA_VISIBLE_DEVICES": "",
        "OTEL_DDP_AGENT": "off",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    with Node(**env) as node:
        ours = ("-m", "otel_ddp", "run", "--", sys.executable, "train.py")
        finished(node.start("env", "-C", str(tmp_path), sys.executable, *ours))
        (journal,) = Here(node.place.directory).read()

    names = [name for name, _, _ in points(journal)]
    assert {name: names.count(name) for name in counts} == counts, json.dumps(points(journal))
