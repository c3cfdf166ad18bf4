"""Scripts for W&B with one other import: what is recorded, and what is said of the rest."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from conftest import Here
from node import Node
from otel_ddp.integrations import wandb
from otel_ddp.journal.reader import Document


@pytest.fixture(autouse=True)
def _no_run_is_left() -> None:
    assert wandb.run is None


def test_values_configuration_and_summary_are_recorded_by_the_names_of_the_script(
    place: Here,
) -> None:
    with wandb.init(project="p", group="g", name="n", config={"lr": 0.1, "net": {"a": 1}}) as run:
        assert run is wandb.run
        assert run.config.lr == wandb.config["lr"] == 0.1
        wandb.config.update({"lr": 0.2}, allow_val_change=True)
        wandb.config.update(argparse.Namespace(depth=2))
        wandb.config.seed = 3
        wandb.config.setdefaults({"seed": 4, "epochs": 2})
        wandb.log({"train": {"loss": 2.0}})
        wandb.log({"train": {"loss": 1.0}}, commit=False)
        run.log({"lr": 0.5})
        run.log({"late": 7.0}, step=9)
        run.summary["best"] = 0.25
        assert run.summary.best == 0.25
        assert run.summary["train.loss"] == 1.0

    assert wandb.run is None
    assert wandb.config == wandb.summary == {}
    journal = place.only()
    assert journal.state == "finished"
    assert {key: journal.identity[key] for key in ("project", "group", "name")} == {
        "project": "p",
        "group": "g",
        "name": "n",
    }
    assert journal.config == {"lr": 0.2, "net.a": 1, "depth": 2, "seed": 3, "epochs": 2}
    assert journal.points == [
        ("train.loss", 2.0),
        ("train.loss", 1.0),
        ("lr", 0.5),
        ("late", 7.0),
        ("summary/best", 0.25),
    ]
    assert [call.step for call in journal.calls] == [0, 1, 9, 10]


def test_what_has_no_counterpart_is_named_once_and_does_nothing(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    wandb.login(key="secret")
    with wandb.init(entity="team", settings=wandb.Settings(start_method="thread")) as run:
        for step in range(2):
            image = wandb.Image([step], caption="a")
            run.log(
                {
                    "loss": 1.0,
                    "picture": image,
                    "several": [image],
                    "plot": wandb.plot.confusion_matrix(),
                }
            )
        run.log_code(".")
        with wandb.Artifact("a").new_file("b") as file:
            file.write("c")
        assert not wandb.Table(columns=["a"])

    said = [
        record.getMessage() for record in caplog.records if "counterpart" in record.getMessage()
    ]
    assert [line.split()[1] for line in said] == [
        *("login", "Settings", "init(entity=)", "Image", "plot", "log_code", "Artifact.new_file"),
        "Table",
    ]
    assert place.only().points == [("loss", 1.0)] * 2
    assert "several" not in caplog.text


def test_classes_and_errors_of_wandb_are_classes(place: Here) -> None:
    class Mine(wandb.Callback):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__(log=True)
            self.called = 1

    assert Mine().called == 1
    image = wandb.Image([1])
    assert isinstance(image, wandb.Image)
    assert not isinstance(image, wandb.Table)
    table = wandb.Table(columns=["a"])
    table.add_data(1)
    assert (len(table.data), f"{table.data[0]}") == (0, "")
    assert issubclass(wandb.errors.CommError, wandb.Error)
    assert not isinstance(ValueError(), wandb.Error)
    assert int(wandb.__version__.partition(".")[0]) == 0
    assert len(wandb.util.generate_id(length=5)) == 5


def test_arguments_are_taken_by_the_names_and_in_the_places_of_wandb(
    place: Here, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.pt").write_text("a")
    run = wandb.init("team", tags=["b", "a"], notes="why", job_type="train", config="config.yaml")
    wandb.config.update({"lr": 0.1}, True)
    wandb.config.update([("depth", 2)])
    artifact = wandb.Artifact("model", "model", description="d")
    artifact.metadata["loss"] = 1.0
    artifact.add(wandb.Table(columns=["a"]), "table")
    artifact.add_file(local_path=str(tmp_path / "a.pt"), name="best.pt")
    artifact.add_reference(uri="s3://bucket/b.pt")
    assert run.log_artifact(artifact_or_path=artifact, aliases=["best"]).wait() is artifact
    wandb.save(glob_str=str(tmp_path / "*.pt"))
    told = (run.tags, run.notes, run.job_type, run.path)
    run.name = "late"
    wandb.finish()

    journal = place.only()
    assert told == (("a", "b"), "why", "train", f"{run.project}/{run.id}")
    assert journal.config == {"lr": 0.1, "depth": 2}
    files = [each.content for each in journal.records if isinstance(each, Document)]
    named = sorted(each["name"] for each in files if "uri" in each)
    assert named == ["a.pt", "model/a.pt", "model/b.pt"]
    for each in ("a file of settings", "an argument of init without its name", "run.name = "):
        assert f"wandb: {each}" in caplog.text


def test_a_script_may_put_its_own_dictionary_in_the_place_of_the_configuration(
    place: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"lr": 0.1}
    monkeypatch.setattr(wandb, "config", own)
    run = wandb.init(config={"depth": 2})
    run.finish()

    assert own == {"lr": 0.1}
    assert place.only().config == {"depth": 2}


def test_a_script_that_asks_for_a_sweep_or_for_earlier_runs_hears_of_it_at_once() -> None:
    for name in ("agent", "sweep", "Api"):
        with pytest.raises(AttributeError, match=f"otel_ddp has no wandb.{name}: "):
            getattr(wandb, name)


def test_calls_without_a_run_do_nothing(place: Here) -> None:
    wandb.log({"loss": 1.0})
    wandb.finish()

    assert wandb.run is None
    assert place.read() == []


def test_what_cannot_be_recorded_raises_nothing(
    place: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("otel_ddp.errors.raise_failures", False)
    with wandb.init() as run:
        run.log([1.0])
        run.alert("a", level=3)
        run.log_artifact(None)
        run.log({"loss": 1.0})

    assert place.only().points == [("loss", 1.0)]


def test_files_and_best_values_are_told(place: Here, tmp_path: Path) -> None:
    for name in ("a.pt", "b.pt"):
        (tmp_path / name).write_text(name)
    with wandb.init() as run:
        run.define_metric("wer", summary="min")
        run.define_metric("speed", step_metric="epoch", goal="maximize")
        run.define_metric("train/*", step_metric="epoch")
        artifact = wandb.Artifact("model", type="model", metadata={"loss": 1.0})
        artifact.add_file(tmp_path / "a.pt")
        wandb.log_artifact(artifact)
        artifact.add_file(tmp_path / "b.pt")
        wandb.log_artifact(artifact)
        wandb.save(str(tmp_path / "*.pt"))
        wandb.alert("rises", text="much", level=wandb.AlertLevel.WARN)

    journal = place.only()
    assert journal.facts["best"] == {"wer": "min", "speed": "max"}
    files = [each.content for each in journal.records if isinstance(each, Document)]
    named = sorted(each["name"] for each in files if "uri" in each)
    assert named == ["a.pt", "b.pt", "model", "model/a.pt", "model/b.pt"]


def test_each_init_after_an_end_is_a_run_and_one_that_is_disabled_is_none(place: Here) -> None:
    first = wandb.init(id="one")
    assert wandb.init(id="two") is wandb.init(reinit="return_previous") is first
    wandb.init(id="two", reinit=True).finish(exit_code=1)
    wandb.init(mode="disabled", id="three").log({"loss": 1.0})
    wandb.finish()

    ended = {each.identity["run"]: each.state for each in place.read()}
    assert ended == {"one": "finished", "two": "failed"}


def test_a_script_that_leaves_its_run_open_keeps_its_summary_and_its_failure(
    tmp_path: Path,
) -> None:
    code = """
from otel_ddp.integrations import wandb
run = wandb.init()
run.summary["best"] = 0.5
open(run.dir + "/model.pt", "w").close()
raise ValueError("no more data")
"""
    with Node(OTEL_DDP_AGENT="off") as node:
        program = node.start("env", "-C", str(tmp_path), sys.executable, "-c", code)
        said, _ = program.communicate(timeout=60)
        (journal,) = Here(node.place.directory).read()

    assert "no more data" in said
    assert (journal.state, journal.values) == ("failed", {"summary/best": 0.5})
    assert list(tmp_path.glob("wandb/*/files/model.pt"))


def test_a_script_for_swanlab_runs_by_its_own_names(place: Here) -> None:
    swanlab = wandb
    run = swanlab.init(project="p", experiment_name="n", description="d", config={"lr": 0.1})
    swanlab.log({"loss": 1.0, "picture": swanlab.Image([1])}, step=4)
    swanlab.finish()

    journal = place.only()
    assert (run.name, run.id) == ("n", journal.identity["run"])
    assert (journal.identity["name"], journal.identity["description"]) == ("n", "d")
    assert [(call.step, journal.points) for call in journal.calls] == [(4, [("loss", 1.0)])]
