"""Post-mortems: what a person and a program find in them, and where they lie."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from otel_ddp import errors
from otel_ddp.agent.verdicts import postmortem
from otel_ddp.journal.process_state import ProcessState

S = 1_000_000_000
NOW = 1_700_000_000 * S
SENTENCE = "rank 1 (node-1) was killed in backward after step 17, 0.8 s into it: SIGKILL."
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


def written(directory: Path, run: str = "r", **more: Any) -> Path | None:
    given: dict[str, Any] = {
        "verdict": DEATH,
        "processes": [FAILED, DEAD, process(0)],
        "now_ns": NOW,
        **more,
    }
    return postmortem.write(directory, run, **given)


def text(path: Path | None) -> str:
    assert path is not None
    return path.with_suffix(".txt").read_text()


def block(path: Path | None, head: str) -> list[str]:
    """The lines below a heading, each space once."""
    lines = text(path).partition(f"{head}\n")[2].partition("\n\n")[0].splitlines()
    return [" ".join(line.split()) for line in lines]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "postmortems"


# -- what is in it


def test_the_text_says_what_died_where_every_rank_was_and_what_it_reported(folder: Path) -> None:
    straggler = {"kind": "straggler", "sentence": "rank 0 keeps the others waiting."}
    ranks = [FAILED, process(None, step=None), DEAD, process(0, step=0)]
    path = written(folder, processes=ranks, open_verdicts=[straggler])

    lines = text(path).splitlines()
    assert lines[0] == SENTENCE
    assert lines[2].startswith("run r, 2023-11-14 22:13:19 UTC")
    assert "4 of 4 processes" in lines[2]
    assert block(path, "Where every rank was")[1:] == [
        "0 node-1 running 0 comm_wait 3 s now",
        "1 node-1 killed 17 backward 0.8 s 2 s ago",
        "2 node-1 failed 17 comm_wait 2 s 1 s ago",
        "p4711 node-1 running comm_wait 3 s now",
    ]
    # A reason cannot command a terminal.
    assert block(path, "What they reported") == ["rank 2: RuntimeError: lost\\n\\x1b[31mpeer"]
    assert block(path, "Also open at that moment") == [straggler["sentence"]]


def test_a_program_finds_all_of_it_in_strict_json(folder: Path) -> None:
    gpus = [{"index": "3", "labels": {"rank": "1"}, "throttled": ["hw_thermal"]}]
    path = written(folder, open_verdicts=[{"sentence": "", "ratio": float("inf")}], gpus=gpus)

    assert path is not None
    report = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert report["verdict"] == DEATH
    assert [ProcessState.from_json(each) for each in report["processes"]] == [
        *(FAILED, DEAD, process(0))
    ]
    assert report["open_verdicts"][0]["ratio"] is None
    assert report["gpus"] == gpus


def test_neither_file_grows_with_the_run(folder: Path) -> None:
    path = written(
        folder,
        processes=[process(each, reason="x" * 1000) for each in range(1100)],
        open_verdicts=[{"sentence": "late"}] * 1100,
    )

    assert path is not None
    report = json.loads(path.read_text())
    assert (len(report["processes"]), len(report["open_verdicts"])) == (1000, 64)
    assert len(text(path)) < 100_000
    assert "and 1036 more" in text(path)


# -- where it lies


def test_an_incident_has_one_pair_of_files_and_the_next_has_another(folder: Path) -> None:
    first = written(folder)
    # Another agent has taken the next name.
    (folder / "postmortem-r-2.txt").write_text("half")
    second = written(folder)

    again = written(folder, earlier=first, verdict={**DEATH, "sentence": "more is known"})

    assert (first, again) == (folder / "postmortem-r.json",) * 2
    assert second == folder / "postmortem-r-3.json"
    assert text(first).splitlines()[0] == "more is known"
    assert json.loads(first.read_text())["verdict"]["sentence"] == "more is known"
    assert text(second).splitlines()[0] == SENTENCE
    assert (folder / "postmortem-r-2.txt").read_text() == "half"
    assert len(list(folder.iterdir())) == 5


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("../../etc/passwd", ".._.._etc_passwd"),
        ("", "run"),
        ("é" * 200, "é" * 60),
        ("a\0b\n\udcff", "a_b_"),
    ],
)
def test_any_name_of_a_run_makes_a_file_here(run: str, name: str, folder: Path) -> None:
    assert written(folder, run) == folder / f"postmortem-{name}.json"
    assert len(list(folder.iterdir())) == 2


def test_the_newest_fifty_are_kept_and_foreign_files_left_alone(folder: Path) -> None:
    folder.mkdir(0o700)
    for number in range(55):
        for ending in ("json", "txt"):
            path = folder / f"postmortem-old{number}.{ending}"
            path.write_text("")
            os.utime(path, (number, number))
    for other in ("notes.txt", "postmortem-.json", "postmortem-torn.json.half"):
        (folder / other).write_text("")
        os.utime(folder / other, (0, 0))
    (folder / "postmortem-new.json.half").write_text("")

    written(folder)

    left = {each.name for each in folder.iterdir()}
    kept = {f"postmortem-old{number}.{end}" for number in range(6, 55) for end in ("json", "txt")}
    new = {"postmortem-r.json", "postmortem-r.txt", "postmortem-new.json.half"}
    assert left == {*kept, *new, "notes.txt", "postmortem-.json"}


def test_a_directory_that_is_not_ours_alone_is_not_used(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    folder.chmod(0o755)

    assert written(folder) is None
    assert list(folder.iterdir()) == []
    assert "no post-mortem in" in caplog.text


def test_a_full_disk_is_logged_once_and_leaves_no_unfinished_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written(folder)
    before = {each.name: each.read_bytes() for each in folder.iterdir()}
    real = os.open

    def full(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        # What a full disk takes: a name, and no content.
        made = real(path, flags, *rest, **more)
        if not flags & os.O_CREAT:
            return made
        os.close(made)
        return real("/dev/full", os.O_WRONLY)

    monkeypatch.setattr(os, "open", full)

    assert written(folder) is None
    assert written(folder, earlier=folder / "postmortem-r.json") is None
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == before
    assert caplog.text.count("No space left on device") == 1
    assert not errors.failures
