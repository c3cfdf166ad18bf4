"""Three weeks on 50 nodes of which one is bad: the alert names it, and no other one."""

from __future__ import annotations

import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterator

import pytest
import yaml
from tools.dashboards.queries import boards
from tools.stack.build import Binaries

from node import until
from stack.asked import expression, opened, over_time, since
from stack.servers import DEPLOY, Prometheus
from weeks import Weeks, openmetrics, played

RULES = [DEPLOY / "prometheus" / kind / "fleet.yml" for kind in ("rules", "alerts")]


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
