"""What each integration records is what its framework reports, on two ranks."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import otel_ddp
from conftest import Here
from extras import needed
from integrations import programs
from integrations.launch import Frameworks, Ran, Value, imported, snippet
from otel_ddp.integrations import OpenPhase, checked
from otel_ddp.vocabulary import catalog


@pytest.fixture(scope="module")
def frameworks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Frameworks]:
    """All in one file: together they take half as long to import."""
    with imported(tmp_path_factory.mktemp("frameworks")) as found:
        yield found


@pytest.mark.parametrize(
    ("framework", "group", "phases"),
    [
        # Two while it trains, and the prediction.
        ("trainer", "finetune", "eval checkpoint eval checkpoint eval"),
        # Before it trains, Lightning tries the validation.
        ("lightning", "mnist", "eval eval checkpoint eval checkpoint eval"),
        ("accelerate", "vision", ""),
    ],
)
def test_every_rank_is_measured_and_one_logs(
    request: pytest.FixtureRequest, framework: str, group: str, phases: str
) -> None:
    ran: Ran = request.getfixturevalue(f"by_{framework}")

    assert [each.identity["global_rank"] for each in ran.ranks] == [0, 1]
    assert {each.identity["group"] for each in ran.ranks} == {group}
    assert len({each.identity["run"] for each in ran.ranks}) == 1
    assert [each.total(catalog.TRAINING_STEPS) for each in ran.ranks] == [8, 8]
    assert [each.state for each in ran.ranks] == ["finished", "finished"]
    assert [each.span_names for each in ran.ranks] == [phases.split()] * 2
    assert [ran.logged(1, split) for split in ("train", "val", "test")] == [[], [], []]


def test_no_integration_raises_whatever_its_framework_gives_it(frameworks: Frameworks) -> None:
    ran = frameworks.run(programs.MISUSED, ranks=1)

    assert "OtelDdpCallback.on_log failed; training goes on without it." in ran.printed
    assert [each.state for each in ran.ranks] == ["finished"]


WITHOUT_A_LINE = {
    "a trainer": (
        programs.TRANSFORMERS + programs.TRANSFORMERS_WITHOUT_A_LINE,
        "eval",
        {"train": [2, 4, 6, 8, 8], "val": [8]},
        ("logging_steps", 2),
        {"loss", "train_loss", "train_runtime"},
    ),
    "lightning": (
        programs.LIGHTNING + programs.LIGHTNING_WITHOUT_A_LINE,
        "eval eval checkpoint eval",
        {"train": [1, 3, 5, 7], "val": [7], "test": [8]},
        ("width", 4),
        {"train_loss", "batch"},
    ),
}


@pytest.mark.parametrize(
    ("program", "phases", "logged", "setting", "names"),
    WITHOUT_A_LINE.values(),
    ids=WITHOUT_A_LINE,
)
def test_a_program_without_a_line_is_measured_and_its_values_are_logged_once(
    frameworks: Frameworks,
    program: str,
    phases: str,
    logged: dict[str, list[int]],
    setting: tuple[str, Any],
    names: set[str],
) -> None:
    ran = frameworks.run(programs.WITHOUT_A_LINE + program, ranks=1)

    (rank,) = ran.ranks
    assert rank.total(catalog.TRAINING_STEPS) == 8
    assert rank.span_names == phases.split()
    assert {split: [each.step for each in ran.logged(0, split)] for split in logged} == logged
    assert setting in rank.config.items()
    assert names <= {name for each in ran.logged(0) for name in each.values}


def test_an_argument_that_instrument_does_not_take_raises_where_it_is_given() -> None:
    assert checked({"group": "one", "strategy": "all"}) == {"group": "one", "strategy": "all"}
    with pytest.raises(TypeError, match="grup"):
        checked({"grup": "one"})


def test_a_phase_ends_when_the_next_one_begins(place: Here) -> None:
    run = otel_ddp.init()
    phase = OpenPhase()

    phase.begin("eval")
    phase.begin("checkpoint")
    during = place.only().phase
    phase.end()
    phase.end()
    run.finish()

    assert during == "checkpoint"
    assert place.only().span_names == ["eval", "checkpoint"]
    assert place.only().phase == "other"


def test_what_a_tracker_is_given_once_an_epoch_lies_at_its_number_and_steps_go_on(
    place: Here,
) -> None:
    needed("lightning", "frameworks")
    from otel_ddp.integrations.lightning import OtelDdpLogger

    log = OtelDdpLogger().log_metrics
    os.environ["OTEL_DDP_SAMPLE_STEPS"] = "1"
    model = nn.Linear(4, 1)
    optimizer = SGD(model.parameters(), lr=0.1)
    run = otel_ddp.instrument(model)

    log({"accuracy": 0.1}, step=7)  # before the first step
    for epoch in range(3):
        for _ in range(5):
            model(torch.ones(8, 4)).mean().backward()
            optimizer.step()
        log({"accuracy": epoch / 2}, step=epoch)
    run.finish()

    journal = place.only()
    assert journal.steps_of("accuracy") == [7, 0, 1, 2]
    assert journal.steps_of("learning_rate") == [*range(1, 16)]
    assert journal.progress.step == 15


# -- Hugging Face's Trainer


@pytest.fixture(scope="module")
def by_trainer(frameworks: Frameworks) -> Ran:
    return frameworks.run(
        programs.TRANSFORMERS + snippet("Hugging Face's Trainer") + programs.TRANSFORMERS_REPORT
    )


def test_the_values_of_rank_0_are_those_of_the_trainers_history(
    by_trainer: Ran,
) -> None:
    history = {"train": [], "val": []}
    for entry in by_trainer.report:
        split = "val" if "eval_loss" in entry else "train"
        values = {
            k.removeprefix("eval_"): v for k, v in entry.items() if k not in ("step", "epoch")
        }
        history[split].append(Value(entry["step"], entry["epoch"], values))

    assert by_trainer.logged(0) == history["train"]
    assert by_trainer.logged(0, "val") == history["val"]
    assert {"loss", "grad_norm", "learning_rate"} <= history["train"][0].values.keys()
    assert [each.step for each in history["val"]] == [4, 8]
    ((step, epoch, predicted),) = by_trainer.logged(0, "test")
    assert (step, epoch) == (8, 2.0)
    assert predicted["loss"] == history["val"][-1].values["loss"]


def test_the_loss_of_a_trainer_is_its_mean_over_the_ranks_and_no_ranks_own(
    by_trainer: Ran,
) -> None:
    logged = [entry["loss"] for entry in by_trainer.report if "loss" in entry]
    found: list[list[float]] = [[], []]
    for values, rank in zip(found, by_trainer.ranks, strict=True):
        values += [value for name, value, _ in rank.logged if name == ("loss", "train")]

    # The model returns one as well, on each rank.
    assert found == [logged, []]


def test_the_configuration_is_that_of_trainer_and_model(by_trainer: Ran) -> None:
    config = by_trainer.ranks[0].config

    assert (config["num_train_epochs"], config["logging_steps"]) == (2, 2)
    assert (config["model.width"], config["model.model_type"]) == (4, "tiny")
    assert by_trainer.ranks[0].facts["model"] == "Tiny"
    # Labels have room for the first ones: what the program has chosen.
    assert "num_train_epochs" in list(config)[:10]
    assert not any(name.startswith("model.id2label") for name in config)
    assert config["learning_rate"] == 5e-05
    assert "max_steps" in config
    assert "lr_scheduler_kwargs" not in config
    assert "training_run_info" not in by_trainer.printed


def test_report_to_finds_it_and_an_exception_is_the_end_of_the_run(frameworks: Frameworks) -> None:
    ran = frameworks.run(programs.TRANSFORMERS + programs.TRANSFORMERS_FAILING, ranks=1, fails=True)

    (rank,) = ran.ranks
    assert rank.total(catalog.TRAINING_STEPS) == 2
    assert (rank.state, rank.reason) == ("failed", "RuntimeError: no more data")
    assert rank.identity["name"] == "tiny-1"
    assert 20 * "x" not in str(rank.config)
    # When the evaluation of one set ends, that of the other follows, and then the checkpoint.
    assert rank.span_names == ["eval", "eval"]
    assert [min(each.values) for each in ran.logged(0, "val")] == ["one_loss", "other_loss"]


# -- Lightning


@pytest.fixture(scope="module")
def with_manual_optimization(frameworks: Frameworks) -> Ran:
    """The snippet, and after it another run, of a module with manual optimization."""
    program = programs.LIGHTNING + snippet("Lightning") + programs.LIGHTNING_REPORT
    return frameworks.run(program + programs.LIGHTNING_MANUAL)


@pytest.fixture(scope="module")
def by_lightning(with_manual_optimization: Ran) -> Ran:
    ran = with_manual_optimization
    return ran._replace(ranks=[e for e in ran.ranks if e.identity["group"] != "manual"])


def test_manual_optimization_under_ddp_has_the_phases_of_any_step(
    with_manual_optimization: Ran,
) -> None:
    ranks = [e for e in with_manual_optimization.ranks if e.identity["group"] == "manual"]

    assert [each.total(catalog.TRAINING_STEPS) for each in ranks] == [8, 8]
    assert [each.total(catalog.TRAINING_SAMPLES) for each in ranks] == [64, 64]
    for rank in ranks:
        assert rank.facts["model"] == "Manual"
        for phase in ("data", "forward", "backward", "comm_wait", "optimizer"):
            assert rank.total(catalog.TRAINING_PHASE_TIME, phase=phase) > 0, phase
            # No reason why it is not measured.
            assert rank.facts["capability"][phase] == ""


def test_the_values_of_rank_0_are_those_of_lightnings_own_logger(by_lightning: Ran) -> None:
    rows = list(csv.DictReader(io.StringIO(by_lightning.report["csv"])))
    written: dict[str, list[Value]] = {"train": [], "val": [], "test": []}
    for row in rows:
        values = {k: float(v) for k, v in row.items() if v and k not in ("step", "epoch")}
        split = next(each for each in written if f"{each}_loss" in values)
        written[split].append(Value(int(row["step"]), float(row["epoch"]), values))

    for split, values in written.items():
        assert by_lightning.logged(0, split) == values, split
    assert [each.step for each in written["train"]] == [1, 3, 5, 7]
    assert [each.step for each in written["val"]] == [3, 7]
    assert len(written["test"]) == 1


def test_module_and_trainer_configure_a_run_whose_name_the_folder_of_checkpoints_has(
    by_lightning: Ran,
) -> None:
    rank = by_lightning.ranks[0]
    config, identity = rank.config, rank.identity

    assert (config["width"], config["lr"]) == (4, 0.1)
    assert (config["trainer.max_epochs"], config["trainer.strategy"]) == (2, "DDPStrategy")
    assert rank.facts["model"] == "Tiny"
    assert by_lightning.report["folder"].endswith(f"/mnist/{identity['run']}/checkpoints")


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_an_exception_ends_the_run_of_the_logger_or_callback_and_the_next_training_is_another(
    frameworks: Frameworks, package: str
) -> None:
    """Each alone, and once with the package's other name."""
    program, ours = programs.LIGHTNING, "OtelDdpLogger"
    if package == "pytorch_lightning":
        ours = "OtelDdpCallback"
        other = program.replace("import lightning", "import pytorch_lightning")
        program = programs.FORGET_LIGHTNING + other

    ran = frameworks.run(program + programs.LIGHTNING_BROKEN.replace("OURS", ours), ranks=1)

    failed, finished = sorted(ran.ranks, key=lambda each: each.state)
    assert (failed.state, failed.reason) == ("failed", "RuntimeError: no more data")
    assert finished.state == "finished"
    assert [each.total(catalog.TRAINING_STEPS) for each in (failed, finished)] == [2, 8]
    assert {each.identity["group"] for each in ran.ranks} == {"trials"}
    if package == "lightning":
        assert [each.step for each in ran._replace(ranks=[failed]).logged(0)] == [0, 1]
        # A run that has failed keeps its name, and none begins where the name is asked for.
        named = [["trials", each.identity["run"]] for each in (failed, finished)]
        assert ran.report == named


# -- Accelerate


@pytest.fixture(scope="module")
def by_accelerate(frameworks: Frameworks) -> Ran:
    needed("wandb", "frameworks")
    return frameworks.run(programs.ACCELERATE + snippet("Accelerate"))


def test_the_values_of_rank_0_are_those_of_the_tracker_of_an_accelerator(
    by_accelerate: Ran,
) -> None:
    logged = by_accelerate.logged(0)

    assert [(each.step, each.epoch) for each in logged] == [(n, n // 4) for n in range(8)]
    assert {"loss", "epoch"} == {name for each in logged for name in each.values}
    assert by_accelerate.ranks[0].config["lr"] == 0.1


# -- DeepSpeed


@pytest.mark.stress
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_of_deepspeed_is_measured_under_every_stage_of_zero(
    frameworks: Frameworks, stage: int
) -> None:
    needed("deepspeed", "deepspeed")
    program = programs.DEEPSPEED.replace("STAGE", str(stage))
    ran = frameworks.run(program + snippet("DeepSpeed") + programs.DEEPSPEED_REPORT)

    assert [each.total(catalog.TRAINING_STEPS) for each in ran.ranks] == [2, 2]
    assert [each.total(catalog.TRAINING_SAMPLES) for each in ran.ranks] == [32, 32]
    assert ran.report["steps"] == 2
    assert ran.ranks[0].values["loss"] == pytest.approx(ran.report["loss"])
    assert ran.ranks[0].config["zero_optimization.stage"] == stage
    for phase in ("data", "forward", "backward", "optimizer"):
        assert ran.ranks[1].total(catalog.TRAINING_PHASE_TIME, phase=phase) > 0, phase
