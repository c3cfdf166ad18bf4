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


def train(steps: int = 3) -> otel_ddp.Run:
    run = otel_ddp.init(run="r", group="g")
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


def test_a_run_of_ten_seconds_says_it(place: Here, capsys: pytest.CaptureFixture[str]) -> None:
    train().finish()
    (journal,) = place.journals()

    for after_s in (9, 11):
        end_card.show(
            *(journal, Place(journal.parent), "finished"),
            always=False,
            look=[],
            now_ns=lambda after_s=after_s: time.time_ns() + after_s * 10**9,
        )

    assert capsys.readouterr().err.count("otel_ddp: run g/r finished after ") == 1


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


@contextlib.contextmanager
def stderr_is(stream: object) -> Iterator[None]:
    before, sys.stderr = sys.stderr, stream  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stderr = before


def test_a_full_or_missing_stderr_does_not_hold_the_process(place: Here, shown: None) -> None:
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
    with stderr_is(None):
        train().finish()
