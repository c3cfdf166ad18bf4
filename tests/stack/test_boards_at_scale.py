"""Many ranks: what each board asks when it is opened reads few samples, and brings few series."""

from __future__ import annotations

import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from bench.fleet import RANKS, Fleet, lost
from tools.dashboards.queries import Board, Question, boards
from tools.stack.build import Binaries

from node import until
from stack.asked import Page, expression, opened, since, step_s
from stack.servers import CONFIGURATIONS, DEPLOY, Collector, Prometheus

pytestmark = pytest.mark.stress

NODES = 125
# Prometheus reads as many in a second or so.
MOST_SAMPLES = 10_000_000
FEWER_THAN = 200

# One export long ago, then one every 30 s, some ahead of the clock: at every moment there is
# a value not older than five minutes, and the rules find news however long sending takes.
PAST_S, OFTEN_S, AHEAD_S = 270.0, 30.0, 90.0
RULES_EVERY_S, EVALUATIONS = 5, 3
OF_EVERY_RANK = (
    *("training_state", "hw_power_watts", "rank:training_wait:per_step2m"),
    *("rank:training_work:per_step2m", "gpu:hw_gpu_utilization:last"),
)

BOARDS = list(boards())


class Played(NamedTuple):
    """A Prometheus that has seen the fleet, from when until when."""

    prometheus: Prometheus
    start_s: float
    end_s: float


@pytest.fixture(scope="module")
def played(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    folder = tmp_path_factory.mktemp("scale")
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    quiet = yaml.safe_dump({**config, "rule_files": []})
    judging = yaml.safe_dump({**config, "rule_files": [str(_sooner(folder) / "*.yml")]})
    with (
        Prometheus(binaries, folder / "prometheus", config=quiet) as prometheus,
        Collector(
            *(binaries, folder / "collector", CONFIGURATIONS / "all-in-one.yaml"),
            METRICS_URL=prometheus.otlp_metrics,
        ) as collector,
    ):
        now_ns = time.time_ns()
        fleet = Fleet(
            *(NODES, collector.http),
            began_ns=now_ns - int(PAST_S * 1e9),
            interval_s=PAST_S - OFTEN_S,
            steps_per_s=1 / 60,
        )
        fleet.play(now_ns - int(OFTEN_S * 1e9), paced=False)
        fleet.interval_s = OFTEN_S
        fleet.play(now_ns + int(AHEAD_S * 1e9), paced=False)
        fleet.close()
        exports = 1 + (OFTEN_S + AHEAD_S) // OFTEN_S
        # Node after node: what the last one sent last comes last.
        last = f'training_step{{node="node-{NODES - 1:04}"}}[{PAST_S + AHEAD_S:g}s]'
        ahead_s = now_ns / 1e9 + AHEAD_S
        until(
            lambda: (
                [exports] * RANKS
                == [e.value for e in prometheus.query(f"count_over_time({last})", at_s=ahead_s)]
            ),
            "all that was sent",
        )
        assert not fleet.not_taken
        assert not lost(collector, prometheus)
        _configure(prometheus, folder, judging)
        # Made of what other groups of rules record: so all of these have been asked before.
        evaluated = "count_over_time(run:training_work:max2m[10m])"
        until(
            lambda: (
                any(each.value >= EVALUATIONS for each in prometheus.query(evaluated))
                and all(_count(prometheus, each) == NODES * RANKS for each in OF_EVERY_RANK)
            ),
            "the rules, of every rank",
        )
        yield Played(prometheus, now_ns / 1e9 - PAST_S, time.time())


def _count(prometheus: Prometheus, metric: str, at_s: float | None = None) -> float:
    return sum(each.value for each in prometheus.query(f"count({metric})", at_s=at_s))


def _sooner(folder: Path) -> Path:
    """The deployed rules, evaluated more often: people have minutes until there are some points."""
    rules = folder / "rules"
    rules.mkdir()
    for path in (DEPLOY / "prometheus" / "rules").glob("*.yml"):
        told = yaml.safe_load(path.read_text())
        for group in told["groups"]:
            group["interval"] = f"{RULES_EVERY_S}s"
        (rules / path.name).write_text(yaml.safe_dump(told))
    return rules


def _configure(prometheus: Prometheus, folder: Path, config: str) -> None:
    (folder / "prometheus" / "prometheus.yml").write_text(config)
    asked = urllib.request.Request(f"{prometheus.url}/-/reload", method="POST")
    urllib.request.urlopen(asked, timeout=30).close()


class Answered(NamedTuple):
    """What it costs, which no other program on this machine changes."""

    samples: int
    series: int


def answered(question: Question, expr: str, page: Page, played: Played) -> Answered:
    """Asked for as many steps as the page has, put close together: so many steps take their time
    where numbers are, and of three hours there are some minutes here."""
    steps = page.span_s / step_s(page, question)
    prometheus, start_s, end_s = played
    times = {"start": start_s, "end": end_s, "step": (end_s - start_s) / steps}
    how = "query" if question.instant else "query_range"
    times = {"time": end_s} if question.instant else times
    asked = urllib.parse.urlencode({"query": expr, "stats": "all", **times})
    told = prometheus.api(f"{how}?{asked}")
    return Answered(told["stats"]["samples"]["totalQueryableSamples"], len(told["result"]))


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.title)
def test_an_opened_board_reads_few_samples_and_brings_few_series(
    board: Board, played: Played
) -> None:
    page = since(board.since, played.prometheus, end_s=played.end_s)
    values = opened(board, page)
    # A rate needs several points: its window fits the exports, which are fewer than a real fleet's.
    seldom = page._replace(interval_s=OFTEN_S)

    told = {
        f"{each.panel} {each.ref}: {expr}": answered(each, expr, page, played)
        for each in board.questions
        if not each.collapsed
        for expr in [expression(each, values, seldom)]
    }

    for what, (samples, series) in told.items():
        sys.stdout.write(f"{samples:9} samples {series:4} series  {what[:100]}\n")
    assert {each: samples for each, (samples, _) in told.items() if samples > MOST_SAMPLES} == {}
    assert {each: series for each, (_, series) in told.items() if series >= FEWER_THAN} == {}


def test_the_whole_fleet_and_its_rules_were_there_to_be_asked_for(played: Played) -> None:
    for metric in OF_EVERY_RANK:
        found = _count(played.prometheus, metric, played.end_s)
        assert found == NODES * RANKS, metric
