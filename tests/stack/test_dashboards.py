"""Every query of every board, asked of a real Prometheus as Grafana would ask it."""

from __future__ import annotations

import re
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import pytest
import yaml
from bench.fleet import Fleet
from tools.dashboards.queries import Board, Variable, boards
from tools.stack.build import Binaries

from node import until
from stack.servers import CONFIGURATIONS, DEPLOY, Collector, Prometheus, Sample

NODES, INTERVAL_S, PAST_S = 2, 5.0, 600.0
BOARDS = list(boards())
# Two nodes of a healthy run: nobody was late, hung, died or threw, and nothing was lost. What the
# rules record has one point here, and a rate needs two. All others bring something.
MAY_BE_EMPTY = {
    "Compare": set(),
    "GPUs & nodes": {"Faults", "Swap"},
    "Pipeline": {
        *("Accepted and refused", "Queue", "Sent and failed"),  # the collector is not scraped
        *("Age of heartbeats", "Errors of our hooks", "Not measured", "Records lost"),
        *("Numbers that could not be read", "Values refused"),
    },
    "Ranks": {
        *("GPU-hours lost", "GPU-hours lost, by rank", "Outside the collective", "Slowest rank"),
        *("Longest without progress", "Ranks with most work", "Verdicts", "Work of all ranks"),
        *("Waiting, as a share of the step", "Work per step, against the median rank"),
    },
    "Run": {
        *("Epoch and micro-batches", "Learning rate", "Skipped steps", "Slowest rank"),
        *("GPUs lost to waiting", "MFU", "Ranks with most work", "Samples and tokens"),
        *("Slowest nodes", "Step and work", "Values that were no numbers", "What ended ranks"),
    },
    "Runs": {
        *("Energy", "GPU utilisation", "GPU-hours lost to stragglers", "GPUs lost to waiting"),
        *("MFU", "Power", "Ranks running", "Runs", "Tokens per second"),
    },
}


class Filled(NamedTuple):
    """A Prometheus that has seen a run of two nodes, and when that was."""

    prometheus: Prometheus
    start_s: float
    end_s: float


@pytest.fixture(scope="module")
def filled(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    folder = tmp_path_factory.mktemp("boards")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["rule_files"] = [str(DEPLOY / "prometheus" / "rules" / "*.yml")]
    with (
        Prometheus(binaries, folder / "prometheus", config=yaml.safe_dump(config)) as prometheus,
        Collector(
            *(binaries, folder / "collector", CONFIGURATIONS / "all-in-one.yaml"),
            METRICS_URL=prometheus.otlp_metrics,
        ) as collector,
    ):
        now_ns = time.time_ns()
        began_ns = now_ns - int(PAST_S * 1e9)
        fleet = Fleet(NODES, collector.http, began_ns=began_ns, interval_s=INTERVAL_S)
        fleet.play(now_ns, paced=False)
        fleet.close()
        last = f'count_over_time(training_heartbeat_timestamp_seconds{{node="node-{NODES - 1:04}"}}'
        until(
            lambda: (
                min((each.value for each in prometheus.query(last + "[20m])")), default=0)
                >= PAST_S / INTERVAL_S
            ),
            "all that was sent",
        )
        # The rules are asked as they are deployed, now: what they record has one point.
        until(lambda: prometheus.query("run:training_ranks_running:count"), "the rules", 60.0)
        yield Filled(prometheus, began_ns / 1e9, time.time())


def put_in(text: str, values: Mapping[str, str], filled: Filled) -> str:
    """The query as it leaves Grafana."""
    span_s = int(filled.end_s - filled.start_s)
    known = {"__range": f"{span_s}s", "__rate_interval": "20s", "__interval": "5s", **values}

    def value(found: re.Match[str]) -> str:
        return known[found[1] or found[2]]

    return re.sub(r"\$\{([A-Za-z_]\w*)(?::\w+)?\}|\$([A-Za-z_]\w*)", value, text)


def _shown(sample: Sample) -> str:
    """As Grafana writes what a query_result() brings."""
    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
    return f"{sample.name}{{{labels}}} {sample.value} {sample.time_s}"


def options(variable: Variable, values: Mapping[str, str], filled: Filled) -> list[str]:
    """What there is to choose from."""
    if variable.kind != "query":
        return [each.value for each in variable.options]
    prometheus, query = filled.prometheus, put_in(variable.query, values, filled)
    if found := re.fullmatch(r"label_values\((.*),\s*(\w+)\)", query):
        selector = urllib.parse.quote(found[1])
        said = [str(each) for each in prometheus.api(f"label/{found[2]}/values?match[]={selector}")]
    elif found := re.fullmatch(r"label_names\((.*)\)", query):
        said = [str(e) for e in prometheus.api(f"labels?match[]={urllib.parse.quote(found[1])}")]
    else:
        found = re.fullmatch(r"query_result\((.*)\)", query)
        assert found, query
        said = [_shown(each) for each in prometheus.query(found[1])]
    if variable.regex:
        pattern = re.compile(variable.regex.strip("/"))
        said = [found[1] for each in said if (found := pattern.search(each))]
    return said


def _escaped(value: str) -> str:
    """As Grafana puts a value into a pattern: within a string, where a backslash is two."""
    return re.sub(r"[\\^$*+?.()|\[\]{}]", lambda found: "\\\\" + found[0], value)


def chosen(board: Board, filled: Filled, one: bool) -> dict[str, str]:
    """A value for each variable, All or *one* of each, in the order of their chain."""
    values: dict[str, str] = {}
    for variable in board.variables:
        if variable.kind == "datasource":
            continue
        if variable.kind == "textbox":
            values[variable.name] = variable.query
            continue
        there = options(variable, values, filled)
        assert there, f"{board.title}: nothing to choose for {variable.name}"
        if variable.multi and variable.all_value and not one:
            values[variable.name] = variable.all_value
            continue
        wanted = [each for each in variable.default if each in there] or there[:1]
        values[variable.name] = _escaped(wanted[0]) if variable.multi else wanted[0]
    return values


def answers(board: Board, filled: Filled, one: bool) -> dict[tuple[str, str], int]:
    """How many series each query brings; a query that is wrong raises."""
    values = chosen(board, filled, one)
    found = {}
    for each in board.questions:
        expr = put_in(each.expr, values, filled)
        if each.instant:
            found[each.panel, each.ref] = len(filled.prometheus.query(expr, at_s=filled.end_s))
            continue
        span_s = filled.end_s - filled.start_s
        series = filled.prometheus.query_range(
            expr,
            start_s=filled.start_s,
            end_s=filled.end_s,
            step_s=max(INTERVAL_S, span_s / each.max_points),
        )
        found[each.panel, each.ref] = len(series)
    for mark in board.marks:
        filled.prometheus.query_range(
            put_in(mark.expr, values, filled),
            start_s=filled.start_s,
            end_s=filled.end_s,
            step_s=30,
        )
    return found


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.title)
def test_every_query_is_answered(board: Board, filled: Filled) -> None:
    everything = answers(board, filled, one=False)
    single = answers(board, filled, one=True)

    panels = {panel for panel, _ in everything}
    told = {panel for (panel, _), count in everything.items() if count}
    assert panels - told <= MAY_BE_EMPTY[board.title]
    for key, count in single.items():
        assert count <= everything[key], f"{key}: more when less is chosen"
