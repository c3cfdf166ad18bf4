"""Post-mortems: what a person and a program find in them, and where they lie."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from otel_ddp import errors
from otel_ddp.agent.judge.reports import write_postmortem
from otel_ddp.journal.process_state import ProcessState

S = 1_000_000_000
NOW = 1_700_000_000 * S
SENTENCE = "rank 1 (node-1) was killed in backward after step 17: SIGKILL."
DEATH: dict[str, Any] = {
    "kind": "death",
    "who": {"group": "", "run": "r", "job_type": "train", "node": "node-1", "rank": "1"},
    "sentence": SENTENCE,
    "phase": "backward",
    "step": 17,
    "since_ns": NOW - S,
    "evidence": {"cause": "signal"},
}


RUNNING = ProcessState(
    run="r",
    node="node-1",
    world_size=4,
    pid=4711,
    step=17,
    phase="comm_wait",
    phase_since_ns=NOW - 3 * S,
    started_ns=NOW - 100 * S,
)


def process(rank: int | None, **more: Any) -> ProcessState:
    return dataclasses.replace(RUNNING, rank=rank, **more)


DEAD = process(
    1,
    state="killed",
    phase="backward",
    phase_since_ns=NOW - 2_800_000_000,
    seen_alive_ns=NOW - 2 * S,
)
FAILED = process(
    2, state="failed", reason="RuntimeError: lost\n\x1b[31mpeer", seen_alive_ns=NOW - S
)


def written(
    directory: Path, run: str = "r", earlier: Path | None = None, **more: Any
) -> Path | None:
    found = {"verdict": DEATH, "processes": [FAILED, DEAD, process(0)], **more}
    found["processes"] = [each.to_json() for each in found["processes"]]
    return write_postmortem(directory, run, found, earlier)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "postmortems"


# -- what is in it


def test_a_program_finds_all_of_it_in_strict_json_and_a_person_a_line_a_rank(
    folder: Path,
) -> None:
    gpus = [{"index": "3", "labels": {"rank": "1"}, "throttled": ["hw_thermal"]}]
    path = written(folder, open_verdicts=[{"sentence": "", "ratio": float("inf")}], gpus=gpus)

    assert path is not None
    content = path.read_text()
    report = json.loads(content, parse_constant=lambda word: pytest.fail(word))
    assert report["verdict"] == DEATH
    assert [ProcessState(**each) for each in report["processes"]] == [*(FAILED, DEAD, process(0))]
    assert report["open_verdicts"][0]["ratio"] is None
    assert report["gpus"] == gpus
    ranks = [line for line in content.splitlines() if '"phase_since_ns"' in line]
    assert [json.loads(line.rstrip(","))["rank"] for line in ranks] == [2, 1, 0]
    # A reason cannot command a terminal.
    assert content.replace("\n", "").isprintable()


def test_the_file_does_not_grow_with_the_run(folder: Path) -> None:
    path = written(
        folder,
        processes=[process(each) for each in range(1100)],
        open_verdicts=[{"sentence": "late"}] * 1100,
    )

    assert path is not None
    report = json.loads(path.read_text())
    assert (len(report["processes"]), len(report["open_verdicts"])) == (1000, 64)


# -- where it lies


def test_an_incident_has_one_file_and_the_next_has_another(folder: Path) -> None:
    first = written(folder)
    second = written(folder)

    again = written(folder, earlier=first, verdict={**DEATH, "sentence": "more is known"})

    assert first == again != second
    assert first is not None
    assert second is not None
    assert json.loads(first.read_text())["verdict"]["sentence"] == "more is known"
    assert json.loads(second.read_text())["verdict"]["sentence"] == SENTENCE
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    ("run", "name"),
    [("../../etc/passwd\0\n\udcff", ".._.._etc_passwd_"), ("", "run"), ("é" * 200, "é" * 60)],
)
def test_any_name_of_a_run_makes_a_file_here(run: str, name: str, folder: Path) -> None:
    path = written(folder, run)

    assert path is not None
    assert path.name.rpartition("-")[0] == f"postmortem-{name}"
    assert list(folder.iterdir()) == [path]


def test_the_newest_fifty_are_kept_and_foreign_files_left_alone(folder: Path) -> None:
    folder.mkdir(0o700)
    old = [folder / f"postmortem-old{number}.json" for number in range(55)]
    for number, path in enumerate([folder / "notes.txt", *old]):
        path.write_text("")
        os.utime(path, (number, number))

    new = written(folder)

    assert {*folder.iterdir()} == {*old[6:], new, folder / "notes.txt"}


def test_a_folder_that_cannot_be_written_to_is_logged_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file")

    assert (written(folder), written(folder)) == (None, None)
    assert caplog.text.count("no post-mortem in") == 1
    assert not errors.failures
