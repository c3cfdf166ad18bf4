"""The card at the end of a run: what it says, when it is silent, and that it never waits."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator

import pytest

import otel_ddp
from conftest import Here
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import Survey
from otel_ddp.run import end_card


@pytest.fixture
def shown() -> None:
    os.environ["OTEL_DDP_SAY"] = "all"


def train(steps: int = 3, **arguments: str) -> otel_ddp.Run:
    run = otel_ddp.init(run="r", group="g", **arguments)
    for step in range(steps):
        run.log({"loss": 1.0 / (step + 1), "lr": 0.1}, step=step)
    return run


def test_it_says_how_the_run_ended(
    place: Here, shown: None, capsys: pytest.CaptureFixture[str]
) -> None:
    train().finish("failed", reason="no\x1b[31m luck")

    first, *others = capsys.readouterr().err.splitlines()
    assert first.startswith("otel_ddp: run g/r failed after ")
    assert others == [
        "  reason             no�[31m luck",
        "  steps              3",
        "  loss               last 0.33333",
        "  lr                 last 0.1",
    ]


@pytest.mark.parametrize(
    ("say", "steps"),
    [("nothing", 3), ("auto", 3), ("all", 0)],
    ids=["silenced", "short", "without a step"],
)
def test_it_is_silent(
    place: Here,
    capsys: pytest.CaptureFixture[str],
    say: str,
    steps: int,
) -> None:
    os.environ["OTEL_DDP_SAY"] = say

    train(steps).finish()

    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("steps", "job_type", "after_s", "expected"),
    [
        (0, "train", 11, "otel_ddp: run r has recorded no step: pass the model to otel_ddp.instru"),
        (0, "train", 9, ""),
        (0, "serve", 11, ""),
        (3, "train", 11, "otel_ddp: run g/r finished after "),
    ],
)
def test_a_long_training_without_a_step_says_how_to_record_them(
    place: Here,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    steps: int,
    job_type: str,
    after_s: int,
    expected: str,
) -> None:
    monkeypatch.setitem(sys.modules, "torch", sys)
    train(steps, job_type=job_type).finish()
    (journal,) = place.journals()

    end_card.show(
        *(journal, Place(journal.parent), "finished"),
        always=False,
        look=[],
        now_ns=lambda: time.time_ns() + after_s * 10**9,
    )

    said = capsys.readouterr().err
    assert said.startswith(expected)
    assert bool(said) == bool(expected)


def test_only_the_first_rank_says_it(
    place: Here, shown: None, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}.items():
        os.environ[name] = value

    train().finish()

    assert capsys.readouterr().err == ""


def agent_wrote(place: Here, run: otel_ddp.Run) -> None:
    """Best values and verdicts of this run and of another, where an agent leaves them."""
    [journal] = place.directory.glob("*.journal")
    low, high = ({"value": value, "step": 1, "time_ns": 1} for value in (0.25, 3.0))
    row = {"name": "loss", "split": "train", "min": low, "max": high}

    def verdict(kind: str, run: str, sentence: str) -> dict[str, object]:
        return {"kind": kind, "who": {"group": "g", "run": run}, "sentence": sentence}

    late, was_late = (
        {**verdict("straggler", "r", f"rank {rank} {late} late"), "since_ns": 10**9}
        for rank, late in ((1, "is"), (2, "was"))
    )
    told = Survey(
        processes=[ProcessState(journal=journal.name, started_ns=1, summary=[row])],
        verdicts=[late, verdict("bound", "r", "bound")],
        past=[{**was_late, "until_ns": 2 * 10**9}, verdict("stall", "q", "other")],
    )
    place.agent_file.write_text(json.dumps(told.to_json()))


def test_it_tells_what_the_agent_has_written(
    place: Here,
    shown: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    os.environ["TZ"] = "UTC"
    time.tzset()
    run = train()
    agent_wrote(place, run)

    run.finish()

    said = capsys.readouterr().err.splitlines()
    assert said[2:] == [
        "  loss               best 0.25 at step 1, last 0.33333",
        "  lr                 last 0.1",
        "  !                  since 1970-01-01 00:00:01: rank 1 is late",
        "  !                  1970-01-01 00:00:01 to 1970-01-01 00:00:02: rank 2 was late",
    ]


@pytest.mark.parametrize("content", ["", "[[1]]", '{"verdicts": [3]}'])
def test_a_damaged_document_of_an_agent_costs_only_what_is_in_it(
    place: Here, shown: None, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    run = train()
    agent_wrote(place, run)
    place.agent_file.write_text(content)

    run.finish()

    assert "  loss               last 0.33333" in capsys.readouterr().err


@contextlib.contextmanager
def stderr_is(stream: object) -> Iterator[None]:
    before, sys.stderr = sys.stderr, stream  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stderr = before


def test_a_full_pipe_does_not_hold_the_process(place: Here, shown: None) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, bytes(4096))
    os.set_blocking(writing, True)
    run = train()

    with os.fdopen(writing, "w") as stream, stderr_is(stream):
        run.finish()

    os.close(reading)
