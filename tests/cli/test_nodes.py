"""What `otel-ddp nodes` makes of what a Prometheus answers, and how people read it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from documents import check
from fake_prometheus import FakePrometheus, sample
from histories import write_history
from otel_ddp.cli import main

LOST = "node_cause:training_lost_gpus:rate2m"
SEEN = "node:training_seen:timestamp"


@pytest.fixture
def prometheus() -> Iterator[FakePrometheus]:
    with FakePrometheus() as server:
        yield server


def answers(**told: list[dict[str, Any]]) -> Any:
    """By the series that an expression begins with, after its functions."""

    def answer(query: str) -> list[dict[str, Any]]:
        if query.startswith("last_over_time(node:training_late"):
            return told.get("late", [])
        if query.startswith("count(count by (group, run)"):
            return [sample("5")]
        kind = {
            "min by (node)": "since",
            "sum by (node, cause) (sum_over_time": "lost",
            "sum by (node, cause) (max_over_time": "deaths",
            "count by (node, code)": "xids",
            "sum by (node) (max by (node, hw_id)": "held",
            "sum by (node, hw_id)": "gpus",
            "count by (node) (": "runs",
        }
        return told.get(next(word for start, word in kind.items() if query.startswith(start)), [])

    return answer


def asked(
    capsys: pytest.CaptureFixture[str], prometheus: FakePrometheus, *words: str
) -> dict[str, Any]:
    assert main(["nodes", "--prometheus", prometheus.url, "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    check("nodes", found)
    return found


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", None, "many", [], {"a": 1}])
def test_a_value_that_is_no_number_costs_nothing(
    prometheus: FakePrometheus, capsys: pytest.CaptureFixture[str], value: Any
) -> None:
    odd = [sample(value, node="a", cause="late", code="79", hw_id="GPU-0")]
    late = [sample(value, node="a", group="g", run="r")]
    prometheus.answer = answers(
        late=late, lost=odd, deaths=odd, xids=odd, held=odd, gpus=odd, runs=odd, since=odd
    )

    (node,) = asked(capsys, prometheus)["nodes"]

    assert (node["lost_s"], node["runs"], node["since_ns"]) == ({"late": 0.0}, 0, None)
    assert main(["nodes", "--prometheus", prometheus.url]) == 0


@pytest.mark.parametrize("result", ["text", {"a": 1}, None, [1, 2], [{"metric": [], "value": 3}]])
def test_an_answer_of_another_shape_is_no_run(
    prometheus: FakePrometheus, capsys: pytest.CaptureFixture[str], result: Any
) -> None:
    prometheus.answer = lambda _: result

    assert main(["nodes", "--prometheus", prometheus.url]) == 0
    assert " in 0 runs since" in capsys.readouterr().out


def test_a_server_without_these_rules_is_told_to_have_none(
    prometheus: FakePrometheus, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(capsys, prometheus)

    assert found["faults"] == [
        f"{prometheus.url} has recorded no run on any node: load deploy/prometheus/rules"
    ]


def test_a_server_that_cannot_answer_is_told_with_its_reason(
    prometheus: FakePrometheus, capsys: pytest.CaptureFixture[str]
) -> None:
    prometheus.status, prometheus.body = 422, b'{"status": "error", "error": "too many samples"}'

    assert main(["nodes", "--prometheus", prometheus.url]) == 2
    assert capsys.readouterr().err.endswith(" answers 422: too many samples\n")


@pytest.mark.parametrize(("days", "last"), [(7, 7), (30, 30), (90, 30)])
def test_the_last_runs_are_those_of_30_days_at_most(
    prometheus: FakePrometheus, capsys: pytest.CaptureFixture[str], days: int, last: int
) -> None:
    queries: list[str] = []
    late = [sample("0.2", node="a", group=group, run="r") for group in "ghi"]
    told = answers(late=late, runs=[sample("12", node="a")])
    prometheus.answer = lambda query: queries.append(query) or told(query)

    (node,) = asked(capsys, prometheus, "--days", str(days))["nodes"]

    assert (node["runs"], node["last_runs"], len(node["late_in"])) == (12, 10, 3)
    assert node["suspect"]
    assert sum(f"{LOST}[{days}d" in each for each in queries) == 1
    assert sum(f"{SEEN}[{last}d]" in each for each in queries if "late" in each) == 1
    assert all(f"[{each}d" not in query for query in queries for each in {7, 30, 90} - {days, last})


def test_people_see_twenty_nodes_and_those_of_which_nothing_is_known_but_a_death_or_a_fault(
    prometheus: FakePrometheus, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"n{number:02}" for number in range(25)]
    told = {
        "lost": [sample("60", node=each, cause="hang") for each in names[:19]],
        "deaths": [sample("2", node="n19", cause="out_of_memory")],
        "xids": [sample("1", node="n20", code=code) for code in ("119", "79")],
        "held": [sample("90", node="n21")],
    }
    prometheus.answer = answers(runs=[sample("3", node=each) for each in names], **told)

    assert main(["nodes", "--prometheus", prometheus.url]) == 0
    _, _, _, *rows, more, _, quiet = capsys.readouterr().out.splitlines()

    assert [row.split()[0] for row in rows] == [*names[:19], "n20"]
    assert rows[-1].split()[1:] == ["-", "-", "-", "-", "3", "-", "79,", "119", "-", "-", "-"]
    assert more == "and 2 more: --json lists all"
    assert quiet == "3 nodes have cost nothing."


def test_what_comes_from_runs_is_printed_on_one_line_each(
    prometheus: FakePrometheus, capsys: pytest.CaptureFixture[str]
) -> None:
    name = 'a\n"\x1b[31m'
    late = [sample("0.2", node=name, group=group, run='r"\n') for group in "ghi"]
    lost = [sample("3600", node=name, cause="late")]
    prometheus.answer = answers(late=late, runs=[sample("3", node=name)], lost=lost)

    assert main(["nodes", "--prometheus", prometheus.url]) == 0
    lines = capsys.readouterr().out.splitlines()

    assert "\x1b" not in "".join(lines)
    assert len(lines) == 6
    assert " ".join(lines[3].split()[1:]) == "1.0 h 1.0 h - 3 of 3 3 - - - - -"
    assert lines[5].endswith(
        "runs, of 3 groups: drain it and test it (docs/runbooks/NodeLateAgain.md)."
    )


@pytest.mark.parametrize("days", ["0", "-1", "1.5", "x", "", "99999", "²"])
def test_days_are_a_number_of_days(capsys: pytest.CaptureFixture[str], days: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["nodes", "--days", days])

    assert ended.value.code == 2
    assert "not a number of days" in capsys.readouterr().err


def test_a_folder_that_is_none_is_told_and_an_empty_one_has_no_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nodes", str(tmp_path / "no")]) == 2
    assert capsys.readouterr().err.endswith("/no is no folder.\n")

    assert main(["nodes", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("0 nodes in 0 runs since ")


def test_a_run_on_more_nodes_than_files_may_be_open_is_read(tmp_path: Path) -> None:
    for number in range(70):
        node = {"node": f"n{number}", "ranks": 1, "first_rank": number}
        write_history(tmp_path, steps=1, names=(), **node)
    command = [sys.executable, "-m", "otel_ddp", "nodes", str(tmp_path), "--json"]
    few = ["sh", "-c", 'ulimit -S -n 64 && exec "$@"', "sh"]

    found = json.loads(subprocess.run([*few, *command], check=True, capture_output=True).stdout)

    assert (len(found["nodes"]), found["faults"]) == (70, [])
