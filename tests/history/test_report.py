"""A report says what was, as JSON, as a saved page without markup of others, and as a card."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from documents import check
from histories import S, summary, value_rows, write_history
from otel_ddp.history.card import lines
from otel_ddp.history.directory import find_run
from otel_ddp.history.goodput import goodput_of
from otel_ddp.history.page import answers as page_answers
from otel_ddp.history.report import card_of, gather, gpu_words
from otel_ddp.history.run_file import RunFile
from otel_ddp.history.tables import SeriesKey
from otel_ddp.vocabulary import catalog

EVIL = "<img src=x onerror=alert(1)>'\"&\x1b[31m"
BEGAN_NS = 1_700_000_000 * S


def gathered(folder: Path, **arguments: Any) -> dict[str, Any]:
    write_history(folder, "r", began_ns=BEGAN_NS, **arguments)
    with find_run("r", folder) as run:
        return gather(run)


def test_of_a_node_and_its_lead_the_larger_count_of_its_time_is_taken(tmp_path: Path) -> None:
    def counted(seconds: float) -> dict[str, Any]:
        return {"seconds": {"productive": seconds}, "late": {}}

    lead = {**counted(100.0), "nodes": {"node-1": counted(40.0), "node-2": counted(60.0)}}
    write_history(tmp_path, "r", node="node-0", about={"time": lead})
    write_history(tmp_path, "r", node="node-1", first_rank=4, about={"time": counted(50.0)})
    write_history(tmp_path, "r", node="node-2", first_rank=8, about={"time": counted(20.0)})

    with find_run("r", tmp_path) as run:
        goodput = goodput_of(run)

    assert goodput is not None
    assert goodput["rank_s"] == 210.0


def row(name: str, best: float) -> dict[str, Any]:
    return summary(name, "train", [(7, BEGAN_NS, best), (8, BEGAN_NS, 10.0), (9, BEGAN_NS, 9.0)])


def test_it_says_how_the_run_ended_and_what_it_came_to(tmp_path: Path) -> None:
    report = gathered(tmp_path, state="failed", about={"summary": [row("loss", 0.25)]})

    run = report["run"]
    assert (run["group"], run["run"], run["state"]) == ("sweep", "r", "failed")
    assert (run["world_size"], run["nodes"], run["steps"]) == (4, ["node-0"], 300)
    assert run["duration_s"] == pytest.approx(300 * 0.0188, rel=0.02)
    times = report["time"]
    assert sum(times["phases_s"].values()) == pytest.approx(times["steps_s"], rel=1e-3)
    assert times["step_s"] == pytest.approx(0.0185, rel=0.05)
    # 32 samples of each rank in a step: the mean over time, not over steps.
    assert times["work_per_s"] == pytest.approx(4 * 32 * 300 / times["steps_s"])
    [loss] = [each for each in report["values"] if each["name"] == "loss" and each["best"]]
    assert (loss["best"]["value"], loss["best"]["step"], loss["last"]["value"]) == (0.25, 7, 9.0)


def test_it_says_the_last_of_what_only_others_than_rank_0_have_logged(tmp_path: Path) -> None:
    # The agent keeps the summary of rank 0; processes without a number are no rank 0.
    about = {"summary": [row("loss", 0.25)]}
    file = RunFile(write_history(tmp_path, "r", first_rank=3, ranks=2, steps=20, about=about))
    key = SeriesKey("value", "reward", "3", (("split", "train"),))
    file.write(rows={key: value_rows([(1, S, 0.5)])})
    file.close()
    with find_run("r", tmp_path) as run:
        report = gather(run)
    check("report", report)
    told = {each["name"]: (each["last"]["value"], each["best"]) for each in report["values"]}
    assert told["reward"] == (0.5, None)
    assert told["loss"][1]["value"] == 0.25
    text = "\n".join(lines(card_of(report)))
    assert re.search(r"reward +last 0\.5", text)


def test_what_telemetry_costs_is_added_up_over_ranks_and_nodes(tmp_path: Path) -> None:
    for node in range(2):
        write_history(tmp_path, "r", node=f"n{node}", ranks=1, first_rank=node, steps=20)
    with find_run("r", tmp_path) as run:
        report = gather(run)

    assert report["cost"] == {"hook_s": 1.0, "hook_share": 0.005}
    assert "  telemetry          hooks 1 s on all ranks (0.5 % of the steps)" in lines(
        card_of(report)
    )


def test_gpus_have_their_mean_and_their_extremes(tmp_path: Path) -> None:
    path = write_history(tmp_path, "r", began_ns=BEGAN_NS)
    key = SeriesKey(
        *("node", catalog.HW_GPU_MEMORY_USAGE.name, "1"),
        (("hw.id", "GPU-1"), ("hw.model", "H100"), ("node", "node-0")),
    )
    file = RunFile(path)
    file.write(rows={key: value_rows([(1, S, 2e9), (2, 2 * S, 5e10)])})
    file.close()
    with find_run("r", tmp_path) as run:
        report = gather(run)

    gpu = next(each for each in report["gpus"] if each["gpu"] == "GPU-1")
    assert (gpu["used_bytes_max"], gpu["model"], gpu["rank"]) == (5e10, "H100", "1")
    assert 0.7 < gpu["busy_ratio_mean"] < 0.9
    [words] = gpu_words(report["gpus"])
    assert words.startswith("4 x H100, busy ")
    assert words.endswith("memory up to 50 GB")


def test_nothing_that_a_run_has_named_is_markup(tmp_path: Path) -> None:
    write_history(
        tmp_path,
        EVIL,
        group=EVIL,
        node=EVIL,
        names=(EVIL,),
        late=1,
        steps=60,
        about={"config": {EVIL: EVIL}, "texts": {"description": EVIL}, "job_type": EVIL},
    )
    postmortems = [{"name": EVIL, "path": EVIL, "sentence": EVIL}]
    with find_run(str(tmp_path), tmp_path) as run:
        report = gather(run, postmortems)
        page = page_answers.saved(run, postmortems)

    packed = re.findall(r'<script type="application/gzip" id="answers">([\w+/=]+)</script>', page)
    answers = json.loads(gzip.decompress(base64.b64decode(packed[0])))
    assert EVIL in answers["run"]["config"]
    assert answers["values"].keys() == {EVIL}
    assert "onerror" not in page
    # What another script would need to run, and where anything could be loaded from.
    policy = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert re.match(r"default-src 'none'; script-src 'nonce-[\w-]{20,}'; style-src", *policy)
    assert set(re.findall(r"<script ([a-z]+)=", page)) == {"nonce", "type"}
    assert not re.search(r'(src|href)="(?![/#]|data:image)', page)
    assert "\x1b" not in "\n".join(lines(card_of(report)))


def test_a_saved_page_has_fewer_points_the_more_lines_there_are(tmp_path: Path) -> None:
    file = RunFile(write_history(tmp_path, "r", names=(), steps=10))
    keys = [
        *(SeriesKey("value", "loss", str(rank)) for rank in range(40)),
        *(SeriesKey("value", f"name-{number}", "0") for number in range(70)),
    ]
    rows = value_rows([(step, S + step, 1.0) for step in range(600)])
    file.write(rows=dict.fromkeys(keys, rows))
    file.close()
    with find_run("r", tmp_path) as run:
        page = page_answers.saved(run)

    [packed] = re.findall(r'id="answers">([\w+/=]+)<', page)
    answers = json.loads(gzip.decompress(base64.b64decode(packed)))
    lengths = {
        name: [len(each["columns"]["x"]) for each in answers["values"][name]["series"]]
        for name in ("loss", "name-0")
    }
    assert lengths == {"loss": [200], "name-0": [300]}
    assert (len(answers["values"]), answers["names"]["left_out"]) == (60, 11)


def test_a_run_without_steps_or_values_has_a_report(tmp_path: Path) -> None:
    file = RunFile(tmp_path / "r.sqlite")
    file.write(about={"run": "r", "group": "g"}, ranks={"0": {"state": "failed", "reason": "no"}})
    file.close()
    with find_run("r", tmp_path) as run:
        report = gather(run)

    assert report["time"]["step_s"] is None
    assert len(list(lines(card_of(report)))) < 5


def test_a_card_has_twenty_lines_at_most(tmp_path: Path) -> None:
    report = gathered(
        tmp_path,
        late=1,
        names=tuple(f"name-{number}" for number in range(30)),
        about={"summary": [row(f"name-{number}", 0.1) for number in range(30)]},
    )
    taken_back = {"kind": "death", "sentence": "NONE", "evidence": {"taken_back": True}}
    report["verdicts"] = [taken_back, *report["verdicts"] * 30]

    found = list(lines(card_of(report, ["here"])))

    assert len(found) <= 20
    assert sum("  rank 1 is slow in forward: 3.0 ms more" in line for line in found) == 4
    assert found[0].startswith("otel_ddp: run sweep/r finished after 6.")
    assert "  name-0             best 0.1 at step 7, last 9" in found
    assert found[-1] == "  look               here"
