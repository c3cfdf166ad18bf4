"""Three weeks on 50 nodes of which one is bad: it is named first, and no other one."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.dashboards.queries import boards
from tools.stack.build import Binaries

from documents import check
from node import until
from otel_ddp.cli import main
from stack.asked import expression, opened, over_time, since
from stack.servers import DEPLOY, Prometheus
from weeks import BAD_GPU, HANGS_AT_S, Weeks, openmetrics, played, write_histories

RULES = [DEPLOY / "prometheus" / kind / "fleet.yml" for kind in ("rules", "alerts")]
SOURCES = ("prometheus", "histories")


@pytest.fixture(scope="module")
def weeks() -> Weeks:
    return played(int(time.time()) // 300 * 300)


@pytest.fixture(scope="module")
def prometheus(
    binaries: Binaries, weeks: Weeks, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """With what its rules have recorded in all that time, and with these rules, every second."""
    folder = tmp_path_factory.mktemp("fleet")
    recorded = folder / "weeks.txt"
    recorded.write_text("\n".join([*openmetrics(weeks), ""]))
    # For each block it reads all of the file: these are as long as they can be.
    command = [binaries.promtool, "tsdb", "create-blocks-from", "openmetrics"]
    command += ["--max-block-duration=60d", recorded, folder / "data"]
    subprocess.run(command, check=True, capture_output=True)
    for path in RULES:
        each_second = re.sub(r"(?<=interval: |     for: )\d+[sm]", "1s", path.read_text())
        (folder / f"{path.parent.name}.yml").write_text(each_second)
    config = yaml.safe_dump({"rule_files": [f"{each.parent.name}.yml" for each in RULES]})
    flags = ("--storage.tsdb.retention.time=60d",)
    with Prometheus(binaries, folder, *flags, config=config) as server:
        until(lambda: server.query('ALERTS{alertstate="firing"}'), "the alert on the bad node")
        yield server


@pytest.fixture(scope="module", params=SOURCES)
def told(
    request: pytest.FixtureRequest, weeks: Weeks, tmp_path_factory: pytest.TempPathFactory
) -> list[str]:
    """Where `otel-ddp nodes` is to read it from."""
    if request.param == "prometheus":
        return ["--prometheus", request.getfixturevalue("prometheus").url]
    folder = tmp_path_factory.mktemp("histories")
    write_histories(weeks, folder)
    return [str(folder)]


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["nodes", *words]) == 0
    return capsys.readouterr().out


def test_the_bad_node_comes_first_with_its_gpu_and_no_other_is_suspected(
    told: list[str], weeks: Weeks, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, Any] = json.loads(asked(capsys, *told, "--json"))
    check("nodes", found)
    first, *others = found["nodes"]

    assert (found["runs"], len(found["nodes"]), found["faults"]) == (len(weeks.runs), 50, [])
    assert first["node"] == weeks.bad
    assert first["suspect"]
    assert [each["node"] for each in others if each["suspect"]] == []
    assert next(iter(first["gpus"])) == f"GPU-{BAD_GPU}"
    in_last = [run for run in weeks.runs if weeks.bad in run.nodes][-10:]
    late = [(run.group, run.name) for run in in_last if run.late and run.late[0] == weeks.bad]
    assert sorted((each["group"], each["run"]) for each in first["late_in"]) == sorted(late)


def test_what_each_node_has_cost_is_right(
    told: list[str], weeks: Weeks, capsys: pytest.CaptureFixture[str]
) -> None:
    found: dict[str, Any] = json.loads(asked(capsys, *told, "--json"))

    for each in found["nodes"]:
        of_node = [run for run in weeks.runs if each["node"] in run.nodes]
        assert each["lost_s"] == pytest.approx(weeks.lost_s(each["node"]), rel=0.01), each["node"]
        assert each["runs"] == len(of_node)
        held_back_s = weeks.held_back_s(each["node"]) if told[0] == "--prometheus" else 0
        assert each["held_back_s"] == pytest.approx(held_back_s, rel=0.01)
        deaths = sum(run.dies == each["node"] for run in of_node)
        assert each["deaths"] == ({"signal": deaths} if deaths else {})
        late = [run.late for run in of_node if run.late]
        hangs = [(run.hangs[0], run.began_s + HANGS_AT_S) for run in of_node if run.hangs]
        first_s = [at_s for node, at_s, *_ in (*late, *hangs) if node == each["node"]]
        if first_s:
            assert abs(each["since_ns"] / 1e9 - min(first_s)) <= 300


def test_people_read_which_node_to_drain(
    told: list[str], weeks: Weeks, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = asked(capsys, *told).splitlines()

    assert lines[3].startswith(weeks.bad)
    assert [line.split()[1] for line in lines if line.startswith("! ")] == [weeks.bad]
    assert "drain it and test it" in lines[-1]


def test_the_alert_names_the_bad_node_and_no_other(prometheus: Prometheus, weeks: Weeks) -> None:
    firing = prometheus.query('ALERTS{alertstate="firing"}')

    assert [(each.labels["alertname"], each.labels["node"]) for each in firing] == [
        ("NodeLateAgain", weeks.bad)
    ]


def test_the_board_draws_all_hours_of_weeks_not_those_of_some_moments(
    prometheus: Prometheus, weeks: Weeks
) -> None:
    (board,) = (each for each in boards() if each.title == "Fleet")
    (question,) = (each for each in board.questions if each.panel == "By cause")
    page = since(board.since, prometheus, end_s=time.time())
    expr = expression(question, opened(board, page), page)

    drawn_s = {
        each.labels["cause"]: sum(hours for _, hours in each.points) * 3600
        for each in over_time(question, expr, page)
    }

    lost_s: Counter[str] = Counter()
    for node in {node for run in weeks.runs for node in run.nodes}:
        lost_s.update(weeks.lost_s(node))
    # A hang is over before the next step. The last step, which is not over, is not drawn.
    assert drawn_s == pytest.approx(lost_s, rel=0.02)


def test_a_second_prometheus_keeps_what_the_first_has_recorded(
    binaries: Binaries, prometheus: Prometheus, weeks: Weeks, tmp_path: Path
) -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "months.yml").read_text())
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [prometheus.url.removeprefix("http://")]}]
    job["scrape_interval"] = "1s"

    with Prometheus(binaries, tmp_path, config=yaml.safe_dump(config)) as months:
        kept = until(lambda: months.query("node:training_late:share30d"), "the late runs")

    assert {each.labels["node"] for each in kept} == {weeks.bad}
