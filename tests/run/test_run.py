"""What a run promises to whoever holds it."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
import os
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import otel_ddp
from conftest import Here, group_of_one
from otel_ddp import ConfigError, errors
from otel_ddp.journal import place as places
from otel_ddp.recording import agent_start
from otel_ddp.vocabulary import catalog

torch = pytest.importorskip("torch")


def test_what_is_logged_is_recorded_with_its_step_epoch_split_and_time(place: Here) -> None:
    run = otel_ddp.init()

    before = time.time_ns()
    run.log({"loss": 0.5, "acc": 1}, step=3, epoch=0.25, split="val")
    after = time.time_ns()

    journal = place.only()
    (call,) = journal.calls
    assert journal.points == [("loss", 0.5), ("acc", 1.0)]
    assert (call.step, call.epoch) == (3, 0.25)
    assert before <= call.time_ns <= after
    assert journal.splits() == {"loss": "val", "acc": "val"}


def test_init_and_instrument_twice_are_one_run(place: Here) -> None:
    model = torch.nn.Linear(3, 2)

    first = otel_ddp.init(config={"lr": 0.1})
    second = otel_ddp.init(config={"lr": 0.2})
    third = otel_ddp.instrument(model)
    fourth = otel_ddp.instrument(model, config={"seed": 1})

    assert first is second is third is fourth is otel_ddp.current()
    journal = place.only()
    assert journal.config == {"lr": 0.2, "seed": 1}
    assert journal.facts["model"] == "Linear"


def test_instrument_opens_the_run_and_says_what_is_trained(place: Here) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))

    with otel_ddp.instrument(model, group="g", job_type="eval", name="n") as run:
        assert (run.group, run.job_type) == ("g", "eval")

    facts = place.only().facts
    assert facts["model"] == "Sequential"
    assert torch.__version__ == facts["torch"]


def test_what_is_said_for_ever_leaves_room_for_names(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ["OTEL_DDP_JOURNAL_BYTES"] = "128k"
    with otel_ddp.init() as run:
        for number in range(1000):
            run.describe(type(f"Net{number}" * 10, (torch.nn.Module,), {})())
            run.config({"text": f"{number}" * 10})
        run.log(many(100))

    assert len(place.only().values) == 100
    assert caplog.messages == [
        "facts about this program did not fit into the journal (OTEL_DDP_JOURNAL_BYTES).",
        "settings found no room: 1, from 'text' on (OTEL_DDP_JOURNAL_BYTES).",
    ]


def many(count: int) -> dict[str, float]:
    return {f"transformer.h.{number:04}.mlp.c_fc.weight.norm": 1.0 for number in range(count)}


def test_names_leave_room_for_the_rank_that_is_learned_later(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ["OTEL_DDP_JOURNAL_BYTES"] = "128k"
    run = otel_ddp.init(world_size=2)
    run.log(many(400))
    before = place.only().identity
    with group_of_one():
        run.log({"loss": 1.0})

    after = place.only().identity
    assert (before["global_rank"], before["settled"]) == (None, False)
    assert (after["global_rank"], after["settled"]) == (0, True)
    assert run.identity.global_rank == 0
    assert len(caplog.messages) == 1, "names were refused"


def test_settings_that_find_no_room_at_all_are_named(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    with otel_ddp.init(global_rank=1, world_size=2) as run:
        run.config({f"key{number}": "x" * 1000 for number in range(80)})
        run.config({"a": {f"key{number}": number for number in range(3000)}})

    kept = sum(name.startswith("key") for name in place.only().config)
    assert 55 < kept < 65
    assert caplog.messages == [
        # As many as go into 64 KiB.
        f"settings found no room: {80 - kept}, from 'key{kept}' on (OTEL_DDP_JOURNAL_BYTES).",
        "of a configuration 2000 settings are recorded at most, so what follows is left out.",
    ]


@dataclasses.dataclass
class Config:
    lr: float = 0.1


@pytest.mark.parametrize("opened", [False, True])
def test_config_returns_the_very_object(opened: bool, place: Here) -> None:
    run = otel_ddp.init() if opened else None
    loop: dict[str, Any] = {}
    loop["self"] = loop

    for given in ({"a": {"b": 1}}, Config(), argparse.Namespace(a=1), loop, None, 3, "text"):
        assert otel_ddp.config(given) is given
        if run is not None:
            assert run.config(given) is given

    if run is not None:
        assert {"a.b": 1, "lr": 0.1, "a": 1}.items() <= place.only().config.items()


def test_the_module_is_quiet_without_a_run(caplog: pytest.LogCaptureFixture) -> None:
    otel_ddp.log({"loss": object()}, step=-1)  # type: ignore[dict-item]
    otel_ddp.event("now", anything=1)
    with otel_ddp.phase("eval"), otel_ddp.span("load", shard=1):
        pass
    otel_ddp.finish()
    otel_ddp.finish("nonsense")

    assert otel_ddp.current() is None
    assert caplog.messages == []


def test_the_functions_of_the_module_use_the_open_run(place: Here) -> None:
    otel_ddp.init()

    otel_ddp.log({"loss": 0.5}, step=1, epoch=2.0, split="test")
    with otel_ddp.phase("eval"), otel_ddp.span("load", name="x"):
        otel_ddp.event("now", name="y")
    otel_ddp.config({"lr": 0.1})
    otel_ddp.finish("failed", reason="no more data")

    journal = place.only()
    assert journal.points == [("loss", 0.5)]
    assert ({"eval", "load"}, {"now"}) == (set(journal.spans), set(journal.events))
    assert (journal.state, journal.reason) == ("failed", "no more data")
    assert otel_ddp.current() is None


def test_a_run_starts_runs_and_finishes(place: Here) -> None:
    run = otel_ddp.init()
    starting = place.only()
    run.log({"loss": 0.5})
    running = place.only()
    run.finish()

    assert [
        starting.state,
        running.state,
        place.only().state,
    ] == ["starting", "running", "finished"]
    assert starting.progress.state_since_ns < running.progress.state_since_ns
    assert starting.progress.phase_after_ns == running.progress.phase_after_ns


def test_finish_may_be_called_again_and_everything_afterwards_is_quiet(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    run = otel_ddp.init()
    run.finish()
    before = place.only().records

    run.finish()
    run.finish("failed")
    run.log({"loss": 0.5}, step=1)
    with run.phase("eval"), run.span("inner"):
        run.event("now")
    given = {"a": 1}
    assert run.config(given) is given
    run.describe(None)

    assert before == place.only().records
    assert place.only().state == "finished"
    assert caplog.messages == []


def test_without_an_agent_the_run_warns_when_records_begin_to_be_lost(
    place: Here, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ.update(OTEL_DDP_AGENT="off", OTEL_DDP_JOURNAL_BYTES="128k")
    # Each value is followed by a look around.
    monkeypatch.setattr(agent_start, "CHECK_EVERY_NS", 0)

    run = otel_ddp.init()
    while not place.only().lost:
        before = list(caplog.messages)
        for step in range(50):
            run.log({"loss": 0.5}, step=step)
    run.log({"loss": 0.5})
    run.finish()

    assert before == []
    (full,) = caplog.messages
    assert full.startswith("The journal is full and no agent reads it (OTEL_DDP_AGENT=off)")


def test_a_state_that_is_none_is_an_error_of_the_user(place: Here) -> None:
    run = otel_ddp.init()

    with pytest.raises(ConfigError, match=r'"finished" or "failed", got \'nonsense\''):
        run.finish(state="nonsense")

    assert run is otel_ddp.current()


def test_two_threads_that_end_a_run_end_it_once(
    place: Here, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ["OTEL_DDP_AGENT"] = "external"
    run = otel_ddp.init()
    came, go = threading.Event(), threading.Event()
    handed: list[Any] = []

    def wait_for_agent(*given: Any) -> None:
        handed.append(given)
        came.set()
        go.wait(5)

    monkeypatch.setattr(agent_start, "wait_for_agent", wait_for_agent)
    first = threading.Thread(target=run.finish)
    second = threading.Thread(target=lambda: run.finish("failed"))
    first.start()
    came.wait()
    second.start()
    second.join(0.05)
    go.set()
    first.join()
    second.join()

    assert len(handed) == 1
    assert caplog.messages == []
    assert place.only().state == "finished"


def test_init_after_finish_is_another_run(place: Here) -> None:
    first = otel_ddp.init()
    first.finish()
    second = otel_ddp.init()

    assert first is not second
    assert first.run != second.run
    assert len(place.read()) == 2


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


ENDS: dict[str, tuple[BaseException, str, str]] = {
    "error": (ValueError("no more data"), "failed", "ValueError: no more data"),
    "unspeakable": (Unspeakable(), "failed", "Unspeakable"),
    "long": (ValueError("ñ" * 5000), "failed", "ValueError: " + "ñ" * 988),
    "several lines": (
        ValueError("\nno\r\n\tmore\x1b[31m\x00data\u2028\n"),
        "failed",
        "ValueError: no more [31m data",
    ),
    "exit 0": (SystemExit(0), "finished", ""),
    "exit 3": (SystemExit(3), "failed", "SystemExit: 3"),
}


@pytest.mark.parametrize("end", ENDS)
def test_with_says_how_the_run_ended_and_lets_the_exception_pass(end: str, place: Here) -> None:
    error, state, reason = ENDS[end]

    with pytest.raises(type(error)) as raised, otel_ddp.init():
        raise error

    assert raised.value is error
    journal = place.only()
    assert (state, reason) == (journal.state, journal.reason)


def test_our_own_failure_is_logged_once_counted_and_goes_no_further(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    errors.raise_failures = False
    run = otel_ddp.init()

    class Model:
        @property
        def module(self) -> Any:
            raise ZeroDivisionError("not ours")

    for _ in range(3):
        run.describe(Model())

    assert place.only().total(catalog.OTEL_DDP_HOOK_ERRORS) == 3
    (record,) = caplog.records
    assert record.getMessage() == "Run.describe failed; training goes on without it."
    assert (record.levelno, record.exc_info is not None) == (logging.WARNING, True)


def test_a_copy_of_a_run_is_that_run(place: Here) -> None:
    run = otel_ddp.init()

    assert copy.copy(run) is run
    assert copy.deepcopy({"held": run})["held"] is run


@pytest.mark.parametrize(
    ("first", "script"),
    [("/home/me/mnist/train.py", "mnist/train.py"), ("train.py", "here/train.py"), ("-c", "-c")],
)
def test_a_run_tells_its_script_with_the_folder_that_it_is_in(
    place: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str, script: str
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "argv", [first])

    otel_ddp.init().finish()

    assert place.only().facts["script"] == script


def test_other_arguments_of_a_second_init_give_a_warning(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    told = {"tags": ["b", "a"], "description": 300 * "d"}
    run = otel_ddp.init("main", group="g1", run="r", **told)
    caplog.clear()

    assert otel_ddp.init("main", group=" g1 ", config={"lr": 0.1}, **told) is run
    assert caplog.messages == []
    assert otel_ddp.init("node", group="g2") is run

    assert [message.partition(":")[2].partition(".")[0] for message in caplog.messages] == [
        " strategy='node' comes too late and is ignored",
        " group='g2' comes too late and is ignored",
    ]
    assert (run.group, place.only().config) == ("g1", {"lr": 0.1})
    with pytest.raises(ConfigError, match="strategy must be"):
        otel_ddp.init("bogus")


def test_where_best_values_lie_is_recorded_and_a_second_init_adds_to_it(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    run = otel_ddp.init(best={"wer": "min", "aux_loss": "none"})
    assert otel_ddp.init(best={"aux_loss": "min", "speed": "max"}) is run

    assert place.only().facts["best"] == {"wer": "min", "aux_loss": "min", "speed": "max"}
    assert caplog.messages == []


@pytest.mark.parametrize("best", [{"wer": "lowest"}, {1: "min"}, "wer"])
def test_a_best_value_that_lies_nowhere_is_an_error(best: Any, place: Here) -> None:
    with pytest.raises(ConfigError, match='best must map names to "min", "max" or "none"'):
        otel_ddp.init(best=best)


@pytest.mark.parametrize("model", ["not a model", lambda x: x])
def test_a_model_that_is_no_module_gives_a_warning(
    model: Any, place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    run = otel_ddp.instrument(model)
    run.log({"loss": 1.0})

    (said,) = caplog.messages
    assert said.startswith(f"instrument was given a {type(model).__name__}, which is no torch.nn")
    assert place.only().points == [("loss", 1.0)]


def test_without_a_writable_directory_one_warning_gives_advice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        places, "candidates", lambda env, offline: iter([tmp_path / "no" / "where"])
    )

    otel_ddp.init().log({"loss": 1.0})

    (said,) = caplog.messages
    assert said.endswith("is not recorded; name a writable directory in OTEL_DDP_DIR.")


def test_a_rank_without_a_world_size_gives_a_warning_until_a_process_group_has_it(
    place: Here, caplog: pytest.LogCaptureFixture
) -> None:
    os.environ["RANK"] = "7"

    otel_ddp.init(world_size=8).finish()
    assert caplog.messages == []
    with otel_ddp.init() as run:
        before = run.identity
        with group_of_one():
            run.log({"loss": 1.0})
        after = run.identity

    assert (before.global_rank, before.world_size, before.settled) == (7, None, False)
    assert (after.global_rank, after.world_size, after.settled) == (0, 1, True)
    assert caplog.messages == [
        "RANK is set and WORLD_SIZE is not: this process is recorded as rank 7 of an unknown "
        "number of ranks. Set WORLD_SIZE as well, as torchrun does, or open the run after "
        "init_process_group. If this process is no rank, unset RANK."
    ]


@pytest.mark.parametrize(
    ("version", "runtime"),
    [
        ({"cuda": "12.8", "hip": None, "xpu": None}, "CUDA 12.8"),
        ({"cuda": None, "hip": "6.2.41134-65d174c3e"}, "ROCm 6.2.41134"),
        ({"cuda": None, "hip": None}, ""),
    ],
)
def test_what_torch_drives_its_devices_with_is_recorded_with_its_version(
    place: Here, monkeypatch: pytest.MonkeyPatch, version: dict[str, str | None], runtime: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch.version", SimpleNamespace(**version))
    with otel_ddp.init():
        pass

    facts = place.only().facts
    assert (facts["torch"], facts["device_runtime"]) == (torch.__version__, runtime)


def test_of_the_environment_the_job_and_the_image_are_recorded_and_nothing_else(
    place: Here,
) -> None:
    os.environ |= {"SLURM_JOB_ID": "77", "SLURM_JOB_NAME": "big\nrun", "MY_TOKEN": "not this"}
    os.environ["APPTAINER_CONTAINER"] = "/images/mine.sif"
    with otel_ddp.init():
        pass

    facts = place.only().facts
    assert facts.items() >= {"slurm_job_id": "77", "slurm_job_name": "big run"}.items()
    assert facts["container_image"] == "/images/mine.sif"
    assert "slurm_partition" not in facts
    assert "not this" not in str(facts)
