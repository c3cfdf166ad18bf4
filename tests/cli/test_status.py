"""What otel-ddp status shows, whatever stands in the files that it reads."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

import otel_ddp
from conftest import Here
from otel_ddp.cli import main
from otel_ddp.cli.status import lines

NOW_NS = 10_000_000_000


def process(**more: Any) -> dict[str, Any]:
    return {
        "run": "one",
        "group": "",
        "job_type": "train",
        "node": "alpha",
        "rank": 0,
        "local_rank": 0,
        "world_size": 2,
        "settled": True,
        "pid": 100,
        "state": "running",
        "reason": "",
        "step": 7,
        "phase": "step",
        "phase_since_ns": NOW_NS - 2_000_000_000,
        "started_ns": 1,
        "lost": 0,
        **more,
    }


def shown(*processes: Any, agents: Any = (), unreadable: Any = ()) -> list[str]:
    found = {
        "agents": list(agents),
        "processes": list(processes),
        "unreadable": list(unreadable),
    }
    return list(lines(found, NOW_NS))


def ranks_by_run(told: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in told:
        if line.startswith("run "):
            ranks = found.setdefault(line, [])
        elif line.startswith("  ") and not line.startswith("  rank"):
            ranks.append(line.split()[0])
    return found


def test_ranks_of_runs_that_started_together_stand_under_their_own_heading() -> None:
    told = shown(
        process(run="late", rank=1, started_ns=2),
        process(run="early", rank=10, started_ns=1, world_size=None),
        process(run="late", rank=None, started_ns=3, world_size=None),
        process(run="early", rank=9, started_ns=4, world_size=16),
        process(run="late", rank=0, started_ns=5, group="g"),
        process(run="late", rank=0, started_ns=6, world_size=1),
    )

    assert ranks_by_run(told) == {
        "run early, train, world 16": ["9", "10"],
        "run late, train, world 2": ["0", "1", "?"],
        "run late, group g, train, world 2": ["0"],
    }
    assert [line.split()[1].rstrip(",") for line in told if line.startswith("run ")] == [
        "early",
        "late",
        "late",
    ]


@pytest.mark.parametrize(
    ("state", "waits"), [("starting", True), ("finished", False), ("killed", False)]
)
def test_only_a_living_process_waits_for_its_process_group(state: str, waits: bool) -> None:
    (row,) = (line for line in shown(process(state=state, settled=False)) if "alpha" in line)

    assert waits == ("waits for its process group" in row)


def test_nothing_in_a_cell_reaches_the_terminal_but_text() -> None:
    bad = "a\x1b[31m\nb\x9b\u202e\udcff"
    texts = dict.fromkeys(("run", "group", "job_type", "node", "state", "reason", "phase"), bad)
    agent = {"alive": True, **dict.fromkeys(("pid", "version", "scrape", "export", "remark"), bad)}

    told = shown(process(**texts), agents=[agent], unreadable=[bad])

    assert all(line.isprintable() for line in told)
    assert r"a\x1b[31m\nb\x9b\u202e\udcff" in told[0]


ODD: list[Any] = [None, [1], {"a": [1]}, "text", "", -1, 1.5, True, float("nan"), 10**30]


@pytest.mark.parametrize("odd", ODD, ids=repr)
def test_values_of_another_kind_are_shown_and_stop_nothing(odd: Any) -> None:
    agent = {"alive": True, **dict.fromkeys(("pid", "version", "scrape", "export", "remark"), odd)}
    mixed = [process(**{key: odd}) for key in process()]

    told = shown(*mixed, {}, odd, agents=[agent, odd], unreadable=[odd])

    assert len(mixed) + 1 <= len([line for line in told if line.startswith("  ")])
    assert list(lines({"agents": odd, "processes": odd}, NOW_NS))[1:] == ["no runs"]


def status(how: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m otel_ddp status {how}"
    return subprocess.run(
        ["/bin/bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ,
        check=False,
    )


@pytest.mark.parametrize("option", ["", "--json"])
def test_an_answer_that_finds_no_room_is_said_in_one_sentence(option: str, place: Here) -> None:
    ended = status(f"{option} >/dev/full")

    assert ended.returncode == 1
    assert ended.stderr == "The answer could not be written: No space left on device.\n"


@pytest.mark.parametrize("option", ["", "--json"])
def test_whoever_stops_reading_is_told_nothing_more(option: str, place: Here) -> None:
    ended = status(f"{option} | sleep 0")

    assert (ended.returncode, ended.stderr) == (0, "")


def test_a_terminal_without_these_letters_gets_them_written_out(place: Here) -> None:
    otel_ddp.init(run="ñ").finish()
    os.environ["PYTHONIOENCODING"] = "ascii"

    ended = status("")

    assert (ended.returncode, ended.stderr) == (0, "")
    assert r"run \xf1, train, world 1" in ended.stdout


def test_the_same_for_programs(place: Here, capsys: pytest.CaptureFixture[str]) -> None:
    otel_ddp.init(run="mine").finish()

    assert main(["status", "--json"]) == 0

    (found,) = json.loads(capsys.readouterr().out)["processes"]
    assert (found["run"], found["rank"], found["state"]) == ("mine", 0, "finished")
