"""A report says what was, as JSON, as a page without markup of others, and as a card."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from histories import S, value_sums, write_history, write_profile
from otel_ddp import catalog
from otel_ddp.history import card, profiles
from otel_ddp.history.find_run import find_run
from otel_ddp.history.postmortems import Postmortem
from otel_ddp.history.report import facts, page, run_card
from otel_ddp.history.run_file import RunFile, SeriesKey
from otel_ddp.history.sums import ValueSum

EVIL = "<img src=x onerror=alert(1)>'\"&\x1b[31m"
BEGAN_NS = 1_700_000_000 * S
VOID = {"meta", "img", "br", "input"}


class Page(HTMLParser):
    """The tags of a page, all of which are closed, and its text."""

    def __init__(self, lines: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(lines)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.text += data


def gathered(folder: Path, **arguments: Any) -> dict[str, Any]:
    write_history(folder, "r", began_ns=BEGAN_NS, **arguments)
    with find_run("r", folder) as run:
        return facts.gather(run)


def shown(report: Mapping[str, Any]) -> Page:
    return Page("\n".join(page.page(report)))


def evil_profile() -> profiles.Profile:
    rank = {"rank": 0, "file": "rank-0.json.gz"}
    table = [{"operator": EVIL, "times_s": [1.0]}]
    content = {"why": EVIL, "ranks": [rank], "files": ["rank-0.json.gz"], "table": table}
    return profiles.Profile(Path(EVIL), content)


def summary(name: str, best: float) -> dict[str, Any]:
    point = {"value": best, "step": 7, "time_ns": BEGAN_NS}
    return {
        "name": name,
        "split": "train",
        "direction": "min",
        "last": {**point, "value": 9.0},
        "min": point,
        "max": {**point, "value": 10.0},
    }


def test_profiles_of_the_run_are_shown_with_the_place_of_their_traces(tmp_path: Path) -> None:
    folder = write_profile(tmp_path / "profiles", "sweep", "r")
    write_profile(tmp_path / "profiles", "sweep", "other")
    write_history(tmp_path, "r", began_ns=BEGAN_NS)
    with find_run("r", tmp_path) as run:
        report = facts.gather(run, profiles=profiles.of_run("sweep", "r", tmp_path / "profiles"))

    [found] = report["profiles"]
    traces = [str(folder / "rank-3.json.gz"), str(folder / "rank-0.json.gz")]
    assert (found["ranks"], found["traces"]) == ([3, 0], traces)
    text = shown(report).text
    assert "rank 3 is named by a verdict" in text
    assert "aten::mm (device)4 ms1 ms" in text
    assert all(path in text for path in traces)


def test_it_says_how_the_run_ended_and_what_it_came_to(tmp_path: Path) -> None:
    report = gathered(tmp_path, state="failed", about={"summary": [summary("loss", 0.25)]})

    run = report["run"]
    assert (run["group"], run["run"], run["state"]) == ("sweep", "r", "failed")
    assert (run["world_size"], run["nodes"], run["steps"]) == (4, ["node-0"], 300)
    assert run["duration_s"] == pytest.approx(300 * 0.0188, rel=0.02)
    [loss] = [each for each in report["values"] if each["name"] == "loss" and each["best"]]
    assert (loss["best"]["value"], loss["best"]["step"], loss["last"]["value"]) == (0.25, 7, 9.0)


def test_it_says_who_was_late_since_when_and_what_it_cost(tmp_path: Path) -> None:
    path = write_history(tmp_path, "r", late=1, began_ns=BEGAN_NS)
    file = RunFile(path)
    verdict = {
        "kind": "straggler",
        "who": {"group": "sweep", "run": "r", "node": "node-0", "rank": "3"},
        "phase": "data",
        "step": 20,
        "since_ns": BEGAN_NS + S,
        "until_ns": BEGAN_NS + 5 * S,
        "sentence": "rank 3 kept the others waiting",
        "evidence": {"lost_s": 7.5},
    }
    file.write(verdicts=[verdict])
    file.close()
    with find_run("r", tmp_path) as run:
        report = facts.gather(run)

    over, still = report["late"]
    assert (over["rank"], over["phase"], over["lost_s"]) == ("3", "data", 7.5)
    assert (still["rank"], still["phase"]) == ("1", "forward")
    assert (still["step"], still["since_step"]) == (100, 60)
    assert still["until_ns"] == report["run"]["seen_ns"]
    text = shown(report).text
    assert "7.5 s" in text
    assert "goes on" not in text
    findings = [line for line in card.lines(run_card.of_report(report)) if " ! " in line]
    assert len(findings) == 2


def test_the_heatmap_shows_the_late_rank(tmp_path: Path) -> None:
    work = gathered(tmp_path, late=2)["work"]

    assert work["ranks"] == ["0", "1", "2", "3"]
    assert len(work["first_steps"]) <= 120
    means = [sum(row) / len(row) for row in work["work_s"]]
    assert max(range(4), key=means.__getitem__) == 2


def test_of_many_ranks_those_with_most_work_are_shown(tmp_path: Path) -> None:
    work = gathered(tmp_path, ranks=60, steps=20, late=57)["work"]

    assert len(work["ranks"]) == 48
    assert work["left_out"] == 12
    assert "57" in work["ranks"]


def test_the_phases_are_the_time_of_the_steps(tmp_path: Path) -> None:
    times = gathered(tmp_path)["time"]

    assert sum(times["phases_s"].values()) == pytest.approx(times["steps_s"], rel=1e-3)
    assert times["step_s"] == pytest.approx(0.0185, rel=0.05)


def test_what_telemetry_costs_is_added_up_over_ranks_and_nodes(tmp_path: Path) -> None:
    for node in range(2):
        path = write_history(
            *(tmp_path, "r"), node=f"n{node}", ranks=1, first_rank=node, began_ns=BEGAN_NS
        )
        file = RunFile(path)
        hooks = {catalog.OTEL_DDP_HOOK_TIME.name: 0.25}
        file.write(
            ranks={str(node): {"state": "finished", "totals": hooks}},
            about={"cost": {"hook_s": 9.0, "agent_cpu_s": 1.5}},
        )
        file.close()
    with find_run("r", tmp_path) as run:
        report = facts.gather(run)

    cost = report["cost"]
    assert (cost["hook_s"], cost["agent_cpu_s"]) == (0.5, 3.0)
    assert cost["hook_share"] == pytest.approx(0.25 / report["time"]["steps_s"])


def test_gpus_have_their_mean_and_their_extremes(tmp_path: Path) -> None:
    path = write_history(tmp_path, "r", began_ns=BEGAN_NS)
    key = SeriesKey(
        *("node", catalog.HW_GPU_MEMORY_USAGE.name, "1"),
        (("hw.id", "GPU-1"), ("hw.model", "H100")),
    )
    file = RunFile(path)
    file.write(values={key: value_sums(file, key, [(1, S, 2e9), (2, 2 * S, 5e10)])})
    file.close()
    with find_run("r", tmp_path) as run:
        report = facts.gather(run)

    gpu = next(each for each in report["gpus"] if each["gpu"] == "GPU-1")
    assert (gpu["used_bytes_max"], gpu["model"], gpu["rank"]) == (5e10, "H100", "1")
    assert 0.7 < gpu["busy_ratio_mean"] < 0.9
    [words] = run_card.gpu_words(report["gpus"])
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
    with find_run(str(tmp_path), tmp_path) as run:
        report = facts.gather(run, [Postmortem(Path(EVIL), 0, EVIL)], [evil_profile()])

    found = shown(report)

    assert "img" not in found.tags
    assert "script" not in found.tags
    assert not [name for name, _ in found.attributes if name.startswith("on")]
    assert not [value for name, value in found.attributes if name in ("src", "href")]
    assert EVIL in found.text
    assert "\x1b" not in "\n".join(card.lines(run_card.of_report(report)))


def test_each_picture_has_a_title_and_a_table(tmp_path: Path) -> None:
    found = shown(gathered(tmp_path))

    pictures = found.tags.count("svg")
    # Two names in two splits, the time, the heatmap.
    assert pictures == 6
    assert found.attributes.count(("role", "img")) == pictures
    # Each has its table behind it, or beside it.
    assert found.tags.count("details") == pictures - 1
    assert ("lang", "en") in found.attributes


def test_a_run_without_steps_or_values_has_a_report(tmp_path: Path) -> None:
    file = RunFile(tmp_path / "r.sqlite")
    file.write(about={"run": "r", "group": "g"}, ranks={"0": {"state": "failed", "reason": "no"}})
    file.close()
    with find_run("r", tmp_path) as run:
        report = facts.gather(run)

    assert report["time"]["step_s"] is None
    assert "Where the time went" not in shown(report).text
    assert len(list(card.lines(run_card.of_report(report)))) < 5


def test_values_that_are_not_finite_are_told_and_spoil_no_curve(tmp_path: Path) -> None:
    path = write_history(tmp_path, "r", began_ns=BEGAN_NS, names=())
    sums = ValueSum(0, S)
    for at, value in enumerate((1.0, math.nan, 1e308, -1e308)):
        sums.add(at, S + at, value, None)
    only_bad = ValueSum(0, S)
    only_bad.add(0, S, math.inf, None)
    file = RunFile(path)
    labels = (("split", "train"),)
    keys = [SeriesKey("value", name, "0", labels) for name in ("wild", "bad")]
    file.write(values={keys[0]: {0: sums}, keys[1]: {0: only_bad}})
    file.close()
    with find_run("r", tmp_path) as run:
        report = facts.gather(run)

    wild, bad = report["curves"]
    assert (wild["not_finite"], len(wild["points"]), bad["points"]) == (1, 1, [])
    text = "\n".join(page.page(report))
    assert "1 values were not finite" in text
    assert "nan" not in text
    assert json.loads(json.dumps(report))["curves"][0]["points"][0][3] == 1e308


def test_a_card_has_twenty_lines_at_most(tmp_path: Path) -> None:
    report = gathered(
        tmp_path,
        late=1,
        names=tuple(f"name-{number}" for number in range(30)),
        about={
            "summary": [summary(f"name-{number}", 0.1) for number in range(30)],
            "cost": {"agent_cpu_s": 2.0},
        },
    )
    report["verdicts"] = report["verdicts"] * 30

    found = list(card.lines(run_card.of_report(report, ["here"])))

    assert len(found) <= 20
    assert found[0].startswith("otel_ddp: run sweep/r finished after 6.")
    assert "  name-0 (train)     best 0.1 at step 7, last 9" in found
    assert "  telemetry          agents 2 s of a core" in found
    assert found[-1] == "  look               here"
