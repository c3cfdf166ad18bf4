"""Post-mortems: what a person and a program find in them, and where they lie."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

import otel_ddp
from conftest import Here
from otel_ddp import errors
from otel_ddp.agent.reading.node_status import survey
from otel_ddp.agent.verdicts import postmortem
from otel_ddp.journal.reader import JournalReader

S = 1_000_000_000
NOW = 1_700_000_000 * S
SENTENCE = "rank 1 (node-1) was killed in backward at step 17, 0.8 s into it: SIGKILL."
DEATH: dict[str, Any] = {
    "kind": "death",
    "who": {"group": "", "run": "r", "job_type": "train", "node": "node-1", "rank": "1"},
    "sentence": SENTENCE,
    "phase": "backward",
    "step": 17,
    "since_ns": NOW - S,
    "evidence": {"cause": "signal"},
}


def process(rank: int | None, **more: Any) -> dict[str, Any]:
    return {
        "run": "r",
        "node": "node-1",
        "rank": rank,
        "world_size": 4,
        "pid": 4711,
        "state": "running",
        "reason": "",
        "step": 17,
        "phase": "comm_wait",
        "phase_since_ns": NOW - 3 * S,
        "seen_alive_ns": NOW,
        "started_ns": NOW - 100 * S,
        **more,
    }


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


def value(rank: int, name: str, number: float, step: int | None = 17) -> dict[str, Any]:
    return {"rank": rank, "name": name, "split": "train", "value": number, "step": step}


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


def block(path: Path | None, head: str) -> list[list[str]]:
    """The words of the lines below a heading."""
    lines = text(path).partition(f"{head}\n")[2].partition("\n\n")[0].splitlines()
    return [line.split() for line in lines]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "postmortems"


# -- what is in it


def test_the_first_line_says_what_died_and_the_second_which_run(folder: Path) -> None:
    lines = text(written(folder)).splitlines()

    assert lines[0] == SENTENCE
    assert lines[2].startswith("run r, 2023-11-14 22:13:19 UTC")
    assert "3 of 4 processes" in lines[2]


def test_the_gpus_are_in_a_table_of_their_own(folder: Path) -> None:
    hot = {
        "index": "3",
        "labels": {"rank": "1"},
        "busy_ratio": 0.98,
        "used_bytes": 70 << 30,
        "limit_bytes": 80 << 30,
        "power_w": 402.6,
        "temperature_c": 91.0,
        "throttled": ["hw_thermal", "sw_power"],
    }

    rows = block(written(folder, gpus=[hot, {"index": "4"}, {"labels": 3}]), "Its GPUs")

    assert rows[1:] == [
        [
            "3",
            "1",
            "98",
            "%",
            "70",
            "of",
            "80",
            "GiB",
            "403",
            "W",
            "91",
            "C",
            "hw_thermal,",
            "sw_power",
        ],
        ["4", "?", "?", "of", "?", "GiB", "?", "?"],
        ["?", "?", "of", "?", "GiB", "?", "?"],
    ]
    assert "Its GPUs" not in text(written(folder, "without"))


def test_every_rank_is_in_the_table_with_phase_and_times(folder: Path) -> None:
    rows = block(written(folder), "Where every rank was")

    assert rows[1:] == [
        ["0", "node-1", "running", "17", "comm_wait", "3.0", "s", "now"],
        ["1", "node-1", "killed", "17", "backward", "0.8", "s", "2.0", "s", "ago"],
        ["2", "node-1", "failed", "17", "comm_wait", "2.0", "s", "1.0", "s", "ago"],
    ]


def test_step_0_is_a_step_and_no_step_is_none(folder: Path) -> None:
    path = written(folder, processes=[process(0, step=0), process(1, step=None)])

    assert [row[3] for row in block(path, "Where every rank was")[1:]] == ["0", "comm_wait"]


def test_a_process_without_a_rank_is_shown_by_its_number(folder: Path) -> None:
    assert (
        block(written(folder, processes=[process(None)]), "Where every rank was")[1][0] == "p4711"
    )


def test_reasons_cannot_command_a_terminal(folder: Path) -> None:
    path = written(folder)

    assert block(path, "What they reported") == [
        ["rank", "2:", "RuntimeError:", "lost", "[31mpeer"],
    ]


def test_last_values_are_one_line_a_name(folder: Path) -> None:
    values = [
        value(0, "loss", 0.25),
        value(1, "loss", 0.5, step=16),
        value(2, "loss", float("nan")),
        value(0, "lr", 0.1, step=None),
    ]

    rows = block(written(folder, values=values), "Last values")

    assert " ".join(rows[1]) == "loss train 0.25 to 0.5, nan on rank 2 step 17 3 ranks"
    assert " ".join(rows[2]) == "lr train 0.1 rank 0"


def test_open_verdicts_are_listed_and_empty_sections_are_left_out(folder: Path) -> None:
    straggler = {"kind": "straggler", "sentence": "rank 0 keeps the others waiting."}

    assert "rank 0 keeps the others waiting." in text(written(folder, open_verdicts=[straggler]))
    assert "Also open" not in text(written(folder))
    assert "Last values" not in text(written(folder))


def stall_of(culprits: list[str]) -> dict[str, Any]:
    """A stall of four ranks that these hold up."""
    rows = [{"rank": str(rank)} for rank in range(4)]
    return {"kind": "stall", "evidence": {"culprits": culprits, "ranks": rows}}


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"evidence": {"cause": "out_of_memory"}}, "host memory"),
        ({"evidence": {"cause": "signal"}}, "printed"),
        ({"evidence": {"cause": "exception"}}, "traceback in the output of rank 1"),
        ({"evidence": {"cause": "unknown"}}, "dmesg"),
        ({"kind": "stall", "evidence": {}}, "otel-ddp stacks"),
        (stall_of(["1", "3"]), "\n  ranks 1, 3: the others wait\n"),
        (stall_of(["0", "1", "2", "3"]), "\n  ranks 0, 1, 2, 3\n"),
    ],
)
def test_what_to_look_at_depends_on_the_cause(
    more: dict[str, Any], word: str, folder: Path
) -> None:
    path = written(folder, verdict={**DEATH, **more})

    assert word in text(path).partition("What to look at")[2]


@pytest.mark.parametrize("ranks", [2, 4])
def test_no_other_node_is_to_be_looked_at_where_all_ranks_are_here(
    ranks: int, folder: Path
) -> None:
    verdict = {**DEATH, "evidence": {"cause": "lost_peer"}}
    path = written(folder, verdict=verdict, processes=list(map(process, range(ranks))))

    assert ("node" in text(path).partition("What to look at")[2]) == (ranks < 4)


def test_a_program_finds_all_of_it_in_strict_json(folder: Path) -> None:
    path = written(folder, values=[value(0, "loss", float("inf"))])

    assert path is not None
    report = json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert report["verdict"] == DEATH
    assert report["processes"] == [FAILED, DEAD, process(0)]
    assert report["values"][0]["value"] == "inf"


def test_neither_file_grows_without_bounds(folder: Path) -> None:
    huge = "x" * 100_000
    path = written(
        folder,
        processes=[process(each, reason=huge, phase=huge) for each in range(900)],
        values=[value(0, f"{each}{huge}", 1.0) for each in range(900)],
        open_verdicts=[{"sentence": huge}] * 900,
    )

    assert path is not None
    assert path.stat().st_size <= 2 * 1024 * 1024
    report = json.loads(path.read_text())
    assert report["left_out"][0] == "values"
    assert report["verdict"]["sentence"] == SENTENCE
    assert len(text(path)) < 100_000
    assert "and 836 more" in text(path)


# -- where it lies


def test_files_and_directory_are_closed_to_others(folder: Path) -> None:
    before = os.umask(0)
    try:
        path = written(folder)
    finally:
        os.umask(before)

    assert path is not None
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {each.stat().st_mode & 0o777 for each in folder.iterdir()} == {0o600}
    assert sorted(each.name for each in folder.iterdir()) == [
        "postmortem-r.json",
        "postmortem-r.txt",
    ]


def test_an_incident_has_one_pair_of_files_and_the_next_has_another(folder: Path) -> None:
    first = written(folder)
    second = written(folder)

    again = written(folder, earlier=first, verdict={**DEATH, "sentence": "more is known"})

    assert (first, again) == (folder / "postmortem-r.json",) * 2
    assert second == folder / "postmortem-r-2.json"
    assert text(first).splitlines()[0] == "more is known"
    assert json.loads(first.read_text())["verdict"]["sentence"] == "more is known"
    assert text(second).splitlines()[0] == SENTENCE
    assert len(list(folder.iterdir())) == 4


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("a/b", "a_b"),
        ("../../etc/passwd", ".._.._etc_passwd"),
        ("", "run"),
        ("训练 1", "训练_1"),
        ("a\0b\n", "a_b_"),
        ("é" * 200, "é" * 60),
        ("\udcff", "_"),
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
    for foreign in ("notes.txt", "postmortem-.json", ".postmortem-torn.json.half"):
        (folder / foreign).write_text("")
        os.utime(folder / foreign, (0, 0))

    written(folder)

    left = {each.name for each in folder.iterdir()}
    assert left >= {"notes.txt", "postmortem-.json", "postmortem-r.txt", "postmortem-old6.txt"}
    assert len([name for name in left if name.endswith("json")]) == 51
    assert not left & {"postmortem-old5.json", "postmortem-old5.txt", ".postmortem-torn.json.half"}


def test_a_file_that_another_agent_is_writing_is_not_touched(folder: Path) -> None:
    folder.mkdir(0o700)
    (folder / ".postmortem-r.json.half").write_text("half")
    os.utime(folder / ".postmortem-r.json.half", (time.time(), time.time()))

    assert written(folder) == folder / "postmortem-r-2.json"
    assert (folder / ".postmortem-r.json.half").read_text() == "half"


@pytest.mark.parametrize("made", ["link", "open", "file"])
def test_a_directory_that_is_not_ours_alone_is_not_used(
    made: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = tmp_path / "other"
    other.mkdir(0o700)
    if made == "link":
        folder.symlink_to(other)
    elif made == "open":
        folder.mkdir()
        folder.chmod(0o755)
    else:
        folder.write_text("")

    assert written(folder) is None
    assert list(other.iterdir()) == []
    assert "no post-mortem in" in caplog.text
    if made == "open":
        assert list(folder.iterdir()) == []


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(
    folder: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    folder.mkdir(0o700)
    (folder / "postmortem-r.txt").symlink_to(victim)

    path = written(folder)

    assert victim.read_text() == "mine"
    assert text(path).startswith(SENTENCE)
    assert not (folder / "postmortem-r.txt").is_symlink()


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


def test_by_default_they_lie_where_a_reboot_leaves_them() -> None:
    assert postmortem.directory("") == Path(f"/var/tmp/otel_ddp-{os.geteuid()}/postmortems")
    assert postmortem.directory("there") == Path.cwd() / "there"


# -- what the agent feeds it


def test_the_last_values_of_a_journal_are_the_last_of_each_name(place: Here, folder: Path) -> None:
    run = otel_ddp.init(run="r")
    run.log({"loss": 2.0, "lr": 0.1}, step=1)
    run.log({"loss": 1.0}, step=2)
    (path,) = place.journals()
    reader = JournalReader(path)
    try:
        reader.read_definitions()
        found = postmortem.last_values(reader, 0, "n")
    finally:
        reader.close()

    assert {(each["name"], each["value"], each["step"]) for each in found} == {
        ("loss", 1.0, 2),
        ("lr", 0.1, 1),
    }
    report = written(
        folder, values=found, processes=[each.to_json() for each in survey([place]).processes]
    )
    assert ["loss", "train", "1", "step", "2", "rank", "0"] in block(report, "Last values")
    assert block(report, "Where every rank was")[1][0] == "0"
