"""What a program tells its trackers is recorded too, and nothing of theirs changes."""

from __future__ import annotations

import json
import os
import sys
from functools import partial
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
from node import Node, finished
from otel_ddp import integrations
from otel_ddp.integrations import trackers
from otel_ddp.integrations.launch.startup.sitecustomize import NAMES
from otel_ddp.recording.values import flat


class SummaryWriter:
    """Stands in for the one of tensorboardX, and takes what that takes."""

    def add_scalar(
        self, tag: str, scalar_value: Any, global_step: Any = None, walltime: Any = None
    ) -> int:
        return len(tag)

    def add_hparams(self, hparam_dict: Any, metric_dict: Any) -> None:
        for name, value in metric_dict.items():
            self.add_scalar(name, value)


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Fresh(SummaryWriter):
        add_scalar = SummaryWriter.add_scalar
        add_hparams = SummaryWriter.add_hparams

    module = ModuleType("tensorboardX")
    module.SummaryWriter = Fresh  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    # Earlier tests of this process have opened runs.
    monkeypatch.setattr("otel_ddp.run.current_run._watched", set())
    trackers.listen()
    # A program may import several packages.
    trackers.listen()
    return Fresh()


def points(journal: Journal) -> list[tuple[str, float, int | None]]:
    return [(name.text, value, step) for name, value, step in journal.logged]


def test_its_values_have_its_steps_and_those_of_the_training_go_on(
    place: Here, writer: Any
) -> None:
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = "1"
    integrations.instrument()
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)

    for step in range(1, 4):
        loss = model(torch.ones(8, 4)).square().mean()
        loss.backward()
        optimizer.step()
        assert writer.add_scalar("return", torch.tensor(step / 2), step * 128) == len("return")
        writer.add_scalar(tag="loss", scalar_value=7.0, global_step=step * 128)
    writer.add_hparams({"lr": 0.1, "net": "small"}, {"best": 0.5})
    otel_ddp.finish()

    journal = place.only()
    found = points(journal)
    logged = [each for each in found if each[0] not in ("learning_rate", "grad_norm")]
    assert logged == [
        *(each for n in (1, 2, 3) for each in (("return", n / 2, n * 128), ("loss", 7.0, n * 128))),
        ("best", 0.5, 3),
    ]
    assert journal.config == {"lr": 0.1, "net": "small"}
    assert [step for name, _, step in found if name == "learning_rate"] == [1, 2, 3]


def test_the_folders_of_writers_tell_their_values_apart(place: Here, writer: Any) -> None:
    def write(folder: str, tag: str = "loss") -> None:
        each = type(writer)()
        # Of torch, and of tensorboardX.
        setattr(each, "log_dir" if "x" in folder else "logdir", folder)
        each.add_scalar(tag, 1.0, 1)

    integrations.instrument()
    for folder in ("runs/x/train", "runs/x/val", "runs/x/critic", "runs/x", "runs/y/eval"):
        write(folder)
    write("runs/x/train", "val_loss")
    write("runs/x/critic", "test/loss")
    otel_ddp.finish()

    assert [(name.text, name.split) for name, _, _ in place.only().logged] == [
        *(("loss", "train"), ("loss", "val"), ("critic/loss", "train"), ("loss", "train")),
        *(("y/loss", "val"), ("val_loss", "val"), ("critic/test/loss", "test")),
    ]


def test_a_program_that_opens_its_run_says_by_itself_whether_its_trackers_are_heard(
    place: Here, writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It waits for the trackers that are not imported yet.
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    run = otel_ddp.instrument()
    writer.add_scalar("loss", 1.0, 1)
    run.log({"loss": 2.0}, step=1)
    assert otel_ddp.instrument(mirror=True) is run
    writer.add_scalar("loss", 3.0, 128)
    run.finish()
    writer.add_scalar("loss", 4.0, 129)

    assert points(place.only()) == [("loss", 2.0, 1), ("loss", 3.0, 128)]


class Unreadable(str):
    """The writer takes it for a name."""

    def __str__(self) -> str:
        raise ValueError("unreadable")


def test_an_error_of_the_writer_is_the_programs_and_one_of_ours_is_not(
    place: Here, writer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("otel_ddp.errors.raise_failures", False)
    integrations.instrument()
    writer.add_scalar("loss", "blob", 1)
    writer.add_scalar("loss", 1.0, "one")
    writer.add_scalar(Unreadable("loss"), 1.0, 2)
    with pytest.raises(TypeError):
        writer.add_scalar("loss")
    otel_ddp.finish()

    assert [each[:2] for each in points(place.only())] == [("loss", 1.0)]
    assert "failed; training goes on without it." in caplog.text


def test_what_a_framework_tells_its_trackers_is_there_once(
    place: Here, writer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("lightning", "transformers"):
        ours = f"otel_ddp.integrations.{name}"
        monkeypatch.setitem(sys.modules, ours, ModuleType(ours))

    def log(tag: str, *modules: str) -> None:
        """As these modules do, the innermost one first."""
        call = partial(writer.add_scalar, tag, 1.0, 1)
        for module in modules:
            frame: dict[str, Any] = {"__name__": module, "inner": call}
            exec("def call(): inner()", frame)
            call = frame["call"]
        call()

    integrations.instrument()
    log("transformers", "transformers.integrations")
    log("lightning", "lightning.pytorch.loggers.tensorboard", "lightning.pytorch.trainer")
    log("mlflow", "mlflow.tracking")
    log("accelerate", "accelerate.tracking", "accelerate.accelerator")
    log("fabric", "lightning.fabric.loggers.tensorboard", "lightning.fabric.fabric")

    # Our integrations record the others.
    assert [name for name, _, _ in points(place.only())] == ["accelerate", "fabric"]


def test_the_import_of_each_tracker_is_noticed() -> None:
    assert {name for name, call in NAMES.items() if call == "trackers.listen"} == {
        *trackers.TRACKERS
    }


# What each tracker is told, and what MLflow and TensorBoard have written: points and settings.
WANDB = """
import threading
import wandb

run = wandb.init(project="p", group="g", name="n", tags=["b", "a"], config={"lr": 0.1})
assert run is wandb.run
wandb.config.update({"net": {"depth": 2}})
wandb.config.seed = 3
for _ in range(2):
    wandb.log({"loss": 0.5, "train": {"acc": 1}, "picture": wandb.Histogram([1, 2])})
wandb.log({"part": 1.0}, commit=False)
thread = threading.Thread(target=wandb.log, args=({"rest": 2.0},))
thread.start()
thread.join()
run.log({"late": 7.0}, step=9)
run.log({"after": 7.0})
wandb.finish(exit_code=3)
wandb.init(config={"fold": 2}).log({"other": 1.0})
wandb.finish(exit_code=1)
"""
MLFLOW = """
import mlflow
from mlflow import log_metric

with mlflow.start_run(run_name="n", tags={"stage": "dev"}):
    mlflow.log_param("lr", 0.1)
    mlflow.log_params({"depth": 2})
    mlflow.set_tag("host", "a")
    for step in range(3):
        log_metric("loss", 1 / (step + 1), step=step * 10)
    mlflow.log_metrics({"a": 1, "b": 2}, step=5)
    try:
        mlflow.log_metric("loss", "none")
    except mlflow.MlflowException:
        mlflow.log_metric("raised", 1, step=0)
"""
MLFLOW_WROTE = """
import glob, json, os


def content(path):
    return {os.path.basename(each): open(each).read() for each in glob.glob(f"mlruns/0/*/{path}/*")}


points = []
for name, lines in content("metrics").items():
    for _, value, step in map(str.split, lines.splitlines()):
        points.append((name, float(value), int(step)))
tags = {k: v for k, v in content("tags").items() if not k.startswith("mlflow.")}
print(json.dumps([sorted(points), {**content("params"), **tags}]))
"""
TENSORBOARD = """
import tensorboardX
from torch.utils.tensorboard import SummaryWriter

with SummaryWriter("one") as one, tensorboardX.SummaryWriter("other") as other:
    for step in range(1, 4):
        one.add_scalar("Loss/train", step / 2, step)
        other.add_scalar("frames", step, step * 128)
"""
TENSORBOARD_WROTE = """
import json
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

points = []
for folder, prefix in (("one", ""), ("other", "other/")):
    events = EventAccumulator(folder).Reload()
    for tag in events.Tags()["scalars"]:
        points += [(prefix + tag, each.value, each.step) for each in events.Scalars(tag)]
print(json.dumps([sorted(points), {}]))
"""
SWANLAB = """
import swanlab

swanlab.config.early = 1
run = swanlab.init(project="p", group="g", experiment_name="n", tags=["b", "a"], config={"lr": 0.1})
swanlab.config.update({"depth": 2})
swanlab.config.seed = 3
for _ in range(2):
    swanlab.log({"loss": 0.5, "train": {"acc": 1}, "note": swanlab.Text("x")})
run.log({"late": 7.0}, step=9)
run.log({"after": 7.0})
swanlab.finish()
"""


def ran(folder: Path, *command: str, **env: str) -> tuple[str, list[Journal]]:
    """What a program printed that was started in this folder, and what was recorded."""
    env |= dict.fromkeys(("HOME", "TMPDIR"), str(folder))
    with Node(OTEL_DDP_AGENT="off", CUDA_VISIBLE_DEVICES="", **env) as node:
        printed = finished(node.start("env", "-C", str(folder), sys.executable, *command))
        return printed, Here(node.place.directory).read() if node.place.directory.exists() else []


OURS = ("-m", "otel_ddp", "run", "--", sys.executable)


@pytest.mark.parametrize(
    ("package", "program", "wrote", "env"),
    [
        ("mlflow", MLFLOW, MLFLOW_WROTE, {"MLFLOW_ALLOW_FILE_STORE": "true"}),
        ("tensorboardX", TENSORBOARD, TENSORBOARD_WROTE, {}),
    ],
    ids=["mlflow", "tensorboard"],
)
def test_a_tracker_writes_what_it_writes_without_us_and_our_points_are_the_same(
    tmp_path: Path, package: str, program: str, wrote: str, env: dict[str, str]
) -> None:
    needed(package, "frameworks")
    found = []
    for name, command in (("bare", ()), ("heard", OURS)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(program)
        where = {"MLFLOW_TRACKING_URI": f"file:{folder}/mlruns"}
        _, journals = ran(folder, *command, "train.py", **env, **where)
        found.append(json.loads(ran(folder, "-c", wrote, **env)[0].splitlines()[-1]))

    bare, heard = found
    assert heard == bare
    assert bare[0]
    assert sorted(map(list, (each for j in journals for each in points(j)))) == bare[0]
    settings = {name: str(value) for journal in journals for name, value in journal.config.items()}
    assert settings == {name: str(value) for name, value in flat(bare[1]).items()}


@pytest.mark.parametrize(
    ("package", "program", "env"),
    [
        ("wandb", WANDB, {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}),
        ("wandb", WANDB, {"WANDB_MODE": "disabled"}),
        pytest.param(*("swanlab", SWANLAB, {"SWANLAB_MODE": "offline"}), marks=pytest.mark.stress),
        pytest.param(*("swanlab", SWANLAB, {"SWANLAB_MODE": "disabled"}), marks=pytest.mark.stress),
    ],
    ids=["wandb-offline", "wandb-disabled", "swanlab-offline", "swanlab-disabled"],
)
def test_names_settings_and_points_are_heard_in_each_mode(
    tmp_path: Path, package: str, program: str, env: dict[str, str]
) -> None:
    needed(package, "swanlab" if package == "swanlab" else "frameworks")
    (tmp_path / "train.py").write_text(program)

    _, journals = ran(tmp_path, *OURS, "train.py", **env)

    first = next(each for each in journals if "lr" in each.config)
    named = {each: first.identity[each] for each in ("project", "group", "name", "tags")}
    assert named == {"project": "p", "group": "g", "name": "n", "tags": "a,b"}
    common = [("loss", 0.5, 0), ("loss", 0.5, 1), ("late", 7.0, 9)]
    if package == "swanlab":
        assert first.config == {"early": 1, "lr": 0.1, "depth": 2, "seed": 3}
        accuracy = [("train/acc", 1.0, step) for step in (0, 1)]
        assert sorted(points(first)) == sorted([*common, *accuracy, ("after", 7.0, 10)])
        return
    assert first.config == {"lr": 0.1, "net.depth": 2, "seed": 3}
    accuracy = [("train.acc", 1.0, step) for step in (0, 1)]
    others = [("part", 1.0, 2), ("rest", 2.0, 2), ("after", 7.0, 9)]
    assert sorted(points(first)) == sorted([*common, *accuracy, *others])
    # The next run of theirs is another one here.
    (other,) = [each for each in journals if each is not first]
    assert (points(other), other.config) == ([("other", 1.0, 0)], {"fold": 2})
    ends = [(each.state, each.reason) for each in (first, other)]
    # The last one ends with the process.
    assert ends == [("failed", "exit code 3"), ("failed", "exit code 1")]


NESTED = """
import mlflow

mlflow.start_run(run_name="first")
for number in range(2):
    with mlflow.start_run(run_name=f"other-{number}", nested=True):
        mlflow.log_metric("other", number, step=number)
    mlflow.log_metric("first", number, step=number)
mlflow.end_run()
with mlflow.start_run(run_name="next"):
    mlflow.log_metric("next", 1, step=3)
"""


def test_nested_runs_are_one_run(tmp_path: Path) -> None:
    needed("mlflow", "frameworks")
    (tmp_path / "train.py").write_text(NESTED)
    where = {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}

    _, journals = ran(tmp_path, *OURS, "train.py", **where)

    both = [each for n in (0, 1) for each in (("other", float(n), n), ("first", float(n), n))]
    found = {each.identity["name"]: points(each) for each in journals}
    assert found == {"first": both, "next": [("next", 1.0, 3)]}
    assert {each.state for each in journals} == {"finished"}


MIRROR = """
import torch
import wandb

run = wandb.init(config={"lr": 0.1}, group="not ours")
import otel_ddp

ours = otel_ddp.instrument(torch.nn.Linear(4, 1), group="ours", mirror=True)
wandb.log({"loss": 1.0}, step=128)
import mlflow

mlflow.log_metric("score", 2.0, step=256)
wandb.finish()
wandb.init(name="another")
ours.log({"own": 3.0}, step=7)
"""


def test_one_argument_mirrors_trackers_that_were_imported_before_and_after(tmp_path: Path) -> None:
    for package in ("wandb", "mlflow"):
        needed(package, "frameworks")
    (tmp_path / "train.py").write_text(MIRROR)
    where = {"MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true"}

    _, (journal,) = ran(tmp_path, "train.py", WANDB_MODE="disabled", **where)

    assert points(journal) == [("loss", 1.0, 128), ("score", 2.0, 256), ("own", 3.0, 7)]
    assert (journal.identity["group"], journal.identity["name"]) == ("ours", "")
    assert journal.config == {"lr": 0.1}
