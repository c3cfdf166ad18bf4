"""The output of otel-ddp status, whatever is in the files that it reads."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import commands
import otel_ddp
from conftest import Here
from golden import Golden
from otel_ddp.cli import main
from otel_ddp.cli.picture import NO_AGENT, Line, picture
from otel_ddp.cli.status import has_colours, styled
from otel_ddp.journal.process_state import ProcessState, measuring, table
from otel_ddp.journal.survey import SCHEMA, Survey, last_of_agent, survey
from otel_ddp.vocabulary.words import NOT_HEARD
from shortages import locked_elsewhere

HOUR_NS = 3600 * 10**9
NOW_NS = 3 * HOUR_NS
PIDS = itertools.count(100)


def process(**more: Any) -> ProcessState:
    told = {"run": "one", "job_type": "train", "node": "alpha", "rank": 0, "local_rank": 0}
    where = {"step": 7, "phase": "step", "phase_since_ns": NOW_NS - 2_000_000_000}
    # Without a journal, its process id tells a process apart.
    pid = next(PIDS)
    return ProcessState(
        **{**told, **where, "world_size": 2, "settled": True, "pid": pid, "started_ns": 1, **more}
    )


def of(rank: int, **more: Any) -> ProcessState:
    return process(rank=rank, **more)


def surveyed(*processes: ProcessState, agents: Iterable[Any] = (), **more: Any) -> Survey:
    whole = [{"alive": True, **each} for each in agents]
    return Survey(agents=whole, processes=table(processes), **more)


def agent_wrote(place: Here, *processes: ProcessState, **told: Any) -> Survey:
    known = Survey(agents=[{"pid": 7}], processes=[*processes], **told)
    place.agent_file.write_text(json.dumps(known.to_json()))
    return known


def lines(found: Survey, now_ns: int = NOW_NS, **how: Any) -> list[str]:
    return [each.text for each in picture(found, now_ns, **how)]


def shown(*processes: ProcessState, **more: Any) -> list[str]:
    return lines(surveyed(*processes, **more))


def verdict(sentence: str, run: str = "one", **more: Any) -> dict[str, Any]:
    return {"who": {"run": run}, "since_ns": HOUR_NS, "sentence": sentence, **more}


def gpu(**more: Any) -> dict[str, Any]:
    return {
        "index": "0",
        "name": "NVIDIA H100",
        "uuid": "GPU-1",
        "labels": {"run": "one", "rank": "3", "node": "alpha"},
        "processes": 1,
        "throttled": [],
        "busy_ratio": 0.871,
        "used_bytes": 60.0 * 2**30,
        "limit_bytes": 80.0 * 2**30,
        "power_w": 411.4,
        "power_limit_w": 700.0,
        "temperature_c": 64.0,
        **more,
    }


def devices(*gpus: Any, **more: Any) -> Survey:
    return surveyed(agents=[{"node": "alpha", "gpus": gpus, **more}])


LATE = {"who": {"run": "one", "rank": "7"}, "kind": "straggler", "sentence": "it is late " * 12}


def many(count: int, **more: Any) -> Survey:
    """So many ranks, of which rank 7 is late, rank 9 has failed, and rank 30 waits less."""
    waits = {7: 0.02, 30: 0.5}
    found = [
        process(
            rank=rank,
            world_size=count,
            node=f"node-{rank // 8}",
            state="failed" if rank == 9 else "running",
            step_s=0.05,
            wait_ratio=waits.get(rank, 0.6),
        )
        for rank in range(count)
    ]
    return surveyed(*found, agents=[{"gpus": [gpu()] * 8, "node": "alpha"}], **more)


def value(name: str, split: str = "", way: str = "") -> dict[str, Any]:
    return {"name": name, "split": split, "direction": way, "last": {"value": 0.123456, "step": 1}}


READ = {"read_ns": NOW_NS - 1_500_000_000}
UNSERVED = {"directory": "/a b", "agent_log": "", "processes": 2}
SCENES = {
    "verdicts, of which the last are those of the past": surveyed(
        process(),
        verdicts=[verdict(kind, kind=kind) for kind in ("straggler", "death", "bound")],
        past=[
            verdict("first", until_ns=2 * HOUR_NS),
            verdict("second", since_ns=NOW_NS - 30 * HOUR_NS, until_ns=2 * HOUR_NS),
            verdict("other", "two", until_ns=2),
        ],
    ),
    "runs and a group with its own": surveyed(
        process(run="late", rank=1, started_ns=2),
        process(run="early", rank=10, started_ns=1, world_size=None),
        process(run="late", rank=None, started_ns=3, world_size=None),
        process(run="early", rank=9, started_ns=4, world_size=16),
        process(run="late", rank=0, started_ns=5, group="g"),
        process(run="late", rank=0, started_ns=6, world_size=1),
    ),
    "a phase is as old as when it was read, unless the rank is silent": surveyed(
        of(0, **READ), of(1, **READ, state=NOT_HEARD)
    ),
    "processes of several roles are one run": surveyed(
        process(rank=0),
        process(rank=1, job_type="worker"),
        process(rank=0, job_type="node_7_evaluates", world_size=1, started_ns=2),
        process(rank=1, group="g", started_ns=3),
        verdicts=[
            verdict("of both roles"),
            verdict("of the group", who={"group": "g", "run": "one"}),
        ],
    ),
    "it goes on with fewer ranks": surveyed(
        *(of(rank, world_size=4, state="killed") for rank in range(4)),
        *(of(rank, started_ns=5) for rank in range(2)),
    ),
    "an evaluator outlives the training": surveyed(
        *(of(rank, state="failed", trains=True) for rank in range(2)),
        of(0, job_type="eval", world_size=1, started_ns=5),
    ),
    "more actors are beside those that train": surveyed(
        *(of(rank, trains=True) for rank in range(2)),
        *(of(rank, job_type="actor", world_size=4) for rank in range(4)),
    ),
    "ranks that cannot be compared": surveyed(
        process(),
        agents=[{}],
        insufficient=[{"run": "one", "why": "few ranks"}, {"run": "other", "why": "of another"}],
    ),
    "no agent, and the reason": Survey(unserved=[{**UNSERVED, "agent_log": "no such library"}]),
    "no agent, and no reason": Survey(unserved=[UNSERVED]),
    "a pipe has twenty rows and whole sentences": many(40, verdicts=[LATE]),
    "last values of the first rank, best ones first": surveyed(
        of(1, summary=[value("lr")]),
        process(
            summary=[
                value("lr", "train"),
                value("acc", "val", "max"),
                *(value(f"n{at}") for at in range(9)),
                {**value("odd", way="min"), "last": None},
            ]
        ),
    ),
    "GPUs": devices(
        gpu(),
        gpu(index="1", labels={"run": "one"}, throttled=["sw_power", "hw_\x1b[2J"]),
        gpu(index="2", labels={"node": "alpha"}, processes=0, used_bytes=2.0 * 2**30),
        # In a container the driver may name no process, but what they hold is there.
        gpu(index="5", labels={"node": "alpha"}, processes=0),
        gpu(index="3", labels={"node": "alpha"}, processes=2),
        # Without the memory, it is not known whether it is free.
        {"index": "6", "name": "Other GPU", "power_w": 150, "processes": 0},
        gpu_driver="NVIDIA driver 550.54.14",
    ),
    "GPUs of two runs, and a remark": devices(
        gpu(),
        gpu(index="1", labels={"run": "two", "rank": "0"}),
        gpu_remarks=["GPU 1 does not answer (GPU is lost)"],
    ),
    "no GPU": devices(gpu_remarks=["There is no NVIDIA driver (Driver Not Loaded)."]),
}


@pytest.mark.parametrize("scene", SCENES)
def test_the_picture_shows(scene: str, golden: Golden) -> None:
    os.environ["TZ"] = "UTC"
    time.tzset()

    golden.check(*(f"{each.style:8}{each.text}" for each in picture(SCENES[scene], NOW_NS)))


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        (
            {"one_of": 8, "share": 0.0041},
            "measures 1 of 8 steps, for 0.41 % of the training thread's time; ",
        ),
        ({"one_of": 1, "share": 0.002}, ""),
        ({"one_of": "8"}, ""),
    ],
)
def test_a_run_says_how_many_of_its_steps_are_measured(fact: Any, words: str) -> None:
    told = measuring(fact)
    shown_lines = shown(*(process(rank=rank, measuring=told) for rank in range(2)))

    assert told.partition("recurring stalls")[0] == words
    assert shown_lines.count(f"  rank 0 {told}") == bool(words)


def test_only_printable_text_of_a_cell_reaches_the_terminal() -> None:
    bad = "a\x1b[31m\nb\x9b\u202e\udcff"
    texts = dict.fromkeys(("run", "group", "job_type", "node", "state", "reason", "phase"), bad)
    agent = dict.fromkeys(("pid", "version", "scrape", "export", "remark"), bad)

    shown_lines = shown(process(**texts), agents=[agent], unreadable=[bad])

    assert all(line.isprintable() for line in shown_lines)
    assert r"a\x1b[31m\nb\x9b\u202e\udcff" in shown_lines[0]


def test_an_agents_file_is_read_as_it_was_written_and_of_another_version_only_who_it_is(
    place: Here,
) -> None:
    one = process(journal="j", description="d", config={"lr": 0.1}, summary=[], read_ns=1)
    known = agent_wrote(place, one, process(), past=[{"who": {}}], unreadable=["why"])
    same = last_of_agent(place)
    other = {"schema": SCHEMA + 1, "agents": [{"pid": 7, "version": "9"}], "processes": [{"x": 1}]}
    place.agent_file.write_text(json.dumps(other))
    with locked_elsewhere(place.agent_lock):
        found = survey([place])

    assert same == known
    assert found.processes == []
    assert "agent     pid 7, version 9" in lines(found)


def test_what_an_agent_tells_of_the_present_holds_while_it_lives(place: Here) -> None:
    over = {"group": "", "run": "over", "why": "why"}
    lacks = {**over, "run": "one"}
    other = process(rank=1, node="beta", world_size=4)
    with locked_elsewhere(place.agent_lock) as holder:
        pid = holder.pid
        # One that has written nothing yet is starting.
        assert survey([place]).agents[0]["starting"] is True
        assert f"agent     pid {pid} is starting" in lines(survey([place]))
        agent_wrote(
            *(place, process(run="over", state="finished"), process(world_size=4), other),
            insufficient=[over, lacks, {**lacks, "group": "another"}],
            links=[{"group": "", "run": "one", "sentence": "leads 2 nodes"}],
        )
        found = survey([place])
        shown_lines = lines(found, NOW_NS)
    dead = survey([place])

    (agent,) = found.agents
    # A run that has ended needs no judgement.
    assert found.insufficient == [lacks]
    # What it calls itself may be a number of another PID namespace.
    assert (agent["pid"], agent["pid_here"]) == (7, pid)
    heading = next(at for at, line in enumerate(shown_lines) if line.startswith("run one"))
    assert shown_lines[heading].endswith("2 of 4 ranks known here")
    assert "  leads 2 nodes" in shown_lines
    assert [each.run for each in dead.processes] == ["over"]
    assert dead.insufficient == dead.links == []


TRAINS = "import otel_ddp; run = otel_ddp.init()"


def test_a_process_without_its_agent_is_shown_with_the_last_line_of_the_agents_log(
    place: Here, tmp_path: Path
) -> None:
    place.agent_log.write_bytes(b"earlier\n" + b"x" * 9000 + b"\nno such library\n\n")
    otel_ddp.init().finish()

    def unserved(seconds: int) -> list[dict[str, Any]]:
        return survey([place], time.time_ns() + seconds * 10**9).unserved

    with locked_elsewhere(tmp_path / "lock", TRAINS):
        early, late = unserved(5), unserved(11)
        with locked_elsewhere(place.agent_lock):
            served = unserved(11)

    where = {"directory": str(place.directory), "agent_log": "no such library"}
    assert (early, late, served) == ([], [{**where, "processes": 1}], [])


@pytest.mark.parametrize("mode", NO_AGENT)
def test_where_no_agent_runs_status_tells_how_one_is_started(
    place: Here, mode: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ["OTEL_DDP_AGENT"] = mode

    assert main(["status"]) == 0

    assert capsys.readouterr().out == f"agent     {NO_AGENT[mode]}\nno runs\n"
    assert lines(Survey(), NOW_NS, named=False)[1:] == ["no runs of this user"]


def status(how: str) -> subprocess.CompletedProcess[str]:
    command = f"{sys.executable} -m otel_ddp status {how}"
    return commands.run("/bin/bash", "-o", "pipefail", "-c", command)


def test_a_full_disk_is_one_sentence_and_a_closed_pipe_or_missing_letters_no_error(
    place: Here,
) -> None:
    agent_wrote(place, process(run="ñ", world_size=1, state="finished"))
    os.environ["PYTHONIOENCODING"] = "ascii"

    full, closed, ascii_alone = (status(how) for how in (">/dev/full", "| sleep 0", ""))

    said = "The answer could not be written: No space left on device.\n"
    assert (full.returncode, full.stderr) == (1, said)
    assert (closed.returncode, closed.stderr) == (0, "")
    assert (ascii_alone.returncode, ascii_alone.stderr) == (0, "")
    assert r"run \xf1, train, world 1" in ascii_alone.stdout


def test_a_run_in_which_nothing_is_wrong_says_so_where_an_agent_looks() -> None:
    bound = {"who": {"run": "one"}, "kind": "bound", "sentence": "input-bound"}
    well = [surveyed(process(), agents=[{}]), surveyed(process(), agents=[{}], verdicts=[bound])]
    unknown = [surveyed(process(), agents=agents) for agents in ([], [{"starting": True}])]
    unknown.append(surveyed(process(), agents=[{"stopped": True}]))
    over = surveyed(process(state="finished"), agents=[{}])
    ill = surveyed(process(), agents=[{}], verdicts=[{**LATE, "who": {"run": "one"}}])

    assert ["  nothing is wrong" in lines(each) for each in (*well, *unknown, over, ill)] == [
        *(True, True, False, False, False, False, False)
    ]


@pytest.mark.parametrize("count", [2, 40, 10_000])
@pytest.mark.parametrize(("columns", "rows"), [(79, 24), (139, 60), (40, 12), (20, 40), (20, 3)])
def test_the_picture_fits_any_terminal_and_the_worst_ranks_come_first(
    count: int, columns: int, rows: int
) -> None:
    drawn = lines(many(count, verdicts=[LATE]), columns=columns, rows=rows)

    assert len(drawn) <= rows
    assert max(map(len, drawn)) <= columns
    if (columns, count) == (79, 10_000):
        head = next(at for at, line in enumerate(drawn) if line.split()[:1] == ["rank"])
        table = drawn[head : drawn.index("", head)]
        assert [line.split()[0] for line in table[1:4]] == ["!7", "9", "30"]
        assert table[-1] == f"  and {count - len(table) + 2:,} more ranks, all running"
        # The GPUs get as many rows.
        gpus = next(at for at, line in enumerate(drawn) if line.startswith("GPUs of alpha"))
        assert len(table) == len(drawn[gpus + 1 : drawn.index("", gpus)])


def test_runs_that_have_ended_take_no_room_from_those_that_go_on() -> None:
    ended = [process(run=f"old-{at}", state="finished") for at in range(9)]
    going_on, over = surveyed(*ended, process(), agents=[{}]), surveyed(*ended, agents=[{}])

    drawn = lines(going_on, columns=79, rows=24)

    assert [line.split(",")[0] for line in drawn if line.startswith("run ")] == ["run one"]
    assert "ended runs that `otel-ddp status` shows: 9" in drawn
    assert any(line.startswith("endpoint") for line in drawn)
    assert "run old-8, train, 1 of 2 ranks here" in lines(over, columns=79, rows=24)


def test_colours_are_for_terminals_that_have_them() -> None:
    os.environ["TERM"] = "xterm"
    os.environ.pop("NO_COLOR", None)
    with_colours = has_colours()
    os.environ["NO_COLOR"] = "1"

    assert (with_colours, has_colours()) == (True, False)
    assert styled([Line("bad", "trouble")], coloured=True) == ["\x1b[1;31mbad\x1b[0m"]
    assert styled([Line("bad", "trouble")], coloured=False) == ["bad"]
