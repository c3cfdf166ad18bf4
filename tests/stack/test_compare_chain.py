"""A value against steps: what the queries of Compare bring is what was sent."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import pytest
from tools.dashboards.queries import FOLDER, board
from tools.stack.build import Binaries

from otel_ddp import settings
from otel_ddp.agent.export.otlp.render import Renderer, resource_of
from otel_ddp.agent.export.otlp.transport import Transport
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Metric
from stack.asked import ALL, Page, answer, opened
from stack.servers import Prometheus, Series

Curve = list[tuple[float, float]]

# What a point of 24 hours is apart is less than a step takes: each one is seen.
STEP_S, EXPORT_S, GRID_S, LOOKBACK_S, FRESH_S = 20.0, 10.0, 15.0, 300.0, 60.0
TOKENS_OF_STEP, STEPS_OF_EPOCH = 4096, 8
STEP, WALL = "training_scalar_step", "training_heartbeat_timestamp_seconds"
START = "training_run_start_timestamp_seconds"
EPOCH, TOKENS = "training_scalar_epoch", "training_tokens_total"
# No metric: since the first start of a run.
ELAPSED = "elapsed"
ALL_X = [STEP, EPOCH, TOKENS, ELAPSED, WALL]
# Of x, in which runs and ranks are averaged: as the board has it before somebody chooses.
WIDTH = 100
LOSS = "training_scalar"


class Attempt(NamedTuple):
    """One process of one rank, and which steps it logs a loss for."""

    run: str
    began_s: float
    """Before the page was opened."""
    steps: Sequence[int]
    logs: Callable[[int], bool] = lambda step: True
    group: str = "g1"
    rank: int = 0

    def loss(self, step: int) -> float:
        return 100.0 / step + self.rank + self.began_s / 1000

    @property
    def labels(self) -> Labels:
        rank = ("rank", str(self.rank)), ("local_rank", str(self.rank))
        return (
            ("group", self.group),
            ("run", self.run),
            ("job_type", "train"),
            ("node", "n"),
            *rank,
        )


def _every(number: int) -> Callable[[int], bool]:
    return lambda step: step % number == 0


ATTEMPTS = [
    Attempt("early", 3000, range(1, 31)),
    Attempt("late", 1500, range(1, 31), group="g2"),
    # From one checkpoint, then from an earlier one, and not as far.
    Attempt("resumed", 2700, range(5, 21)),
    Attempt("resumed", 2200, range(3, 13)),
    Attempt("rarely", 2000, range(1, 31), _every(3)),
    Attempt("several", 1800, range(1, 21)),
    Attempt("several", 1801, range(1, 21), _every(2), rank=1),
    Attempt("several", 1802, range(1, 21), lambda step: step not in (5, 6, 7, 8), rank=2),
]


Samples = list[tuple[float, float]]


class Past:
    """What was sent: of each run, rank and series the samples."""

    def __init__(self, prometheus: Prometheus) -> None:
        now_s = time.time()
        self.page = Page(prometheus, now_s - 24 * 3600, now_s)
        self.sent: dict[tuple[str, int, str], Samples] = {}
        conf = settings.read(env={}, endpoint=f"{prometheus.url}/api/v1/otlp")
        self._transport = Transport(conf, env={})

    def live(self, attempt: Attempt) -> None:
        """All that one process tells, export by export."""
        ledger, renderer = Ledger(), Renderer(resource_of("n", "n"))
        ledger.keep_history = True
        # Never at a moment that the page shows: it would be this sample's or the last one's.
        began_s = math.floor((self.page.end_s - attempt.began_s) / GRID_S) * GRID_S + 1.0
        steps = [(began_s + STEP_S * number, each) for number, each in enumerate(attempt.steps)]
        exports = int(STEP_S * len(steps) / EXPORT_S)
        for at_s in [began_s + EXPORT_S * number for number in range(exports)]:
            done = [step for logged_s, step in steps if logged_s <= at_s]
            for logged_s, step in steps:
                if at_s - EXPORT_S < logged_s <= at_s and attempt.logs(step):
                    self._log(ledger, attempt, step, logged_s)
            self._tell(ledger, attempt, began_s, at_s, len(done))
            self._send(renderer, ledger, at_s)

    def _log(self, ledger: Ledger, attempt: Attempt, step: int, at_s: float) -> None:
        labels = (*attempt.labels, ("name", "loss"), ("split", "train"))
        told = {
            catalog.TRAINING_SCALAR: attempt.loss(step),
            catalog.TRAINING_SCALAR_STEP: step,
            catalog.TRAINING_SCALAR_EPOCH: step // STEPS_OF_EPOCH,
        }
        for metric, value in told.items():
            ledger.log(ledger.series(metric, labels), float(value), _ns(at_s))
            self._keep(attempt, metric, at_s, value)

    def _tell(
        self, ledger: Ledger, attempt: Attempt, began_s: float, at_s: float, done: int
    ) -> None:
        told = {
            catalog.TRAINING_STATE: 1.0,
            catalog.TRAINING_RUN_START_TIMESTAMP: began_s,
            catalog.TRAINING_HEARTBEAT_TIMESTAMP: at_s,
            catalog.TRAINING_TOKENS: TOKENS_OF_STEP * done,
        }
        for metric, value in told.items():
            ledger.put(metric, attempt.labels, value, _ns(at_s), _ns(began_s))
            self._keep(attempt, metric, at_s, value)
        if attempt.rank == 0:
            ledger.put(catalog.TRAINING_RUN_INFO, attempt.labels, 1.0, _ns(at_s))

    def _keep(self, attempt: Attempt, metric: Metric, at_s: float, value: float) -> None:
        name = metric.prometheus
        self.sent.setdefault((attempt.run, attempt.rank, name), []).append((at_s, float(value)))

    def _send(self, renderer: Renderer, ledger: Ledger, at_s: float) -> None:
        for request in renderer.metrics(ledger, _ns(at_s)):
            outcome = self._transport.send("metrics", request.body)
            assert (outcome.kind, outcome.rejected) == ("delivered", 0), outcome

    def close(self) -> None:
        self._transport.close()

    # What the page has to show of it, worked out without Prometheus and without Grafana.

    def stands(
        self, run: str, ranks: Iterable[int], name: str, at_s: float, for_s: float = LOOKBACK_S
    ) -> list[float]:
        """The values of these ranks at a moment: the last one each, unless it is long ago."""
        found = []
        for rank in ranks:
            samples = self.sent.get((run, rank, name), [])
            past = [each for each in samples if at_s - for_s < each[0] <= at_s]
            if past:
                found.append(max(past)[1])
        return found

    def moments(self, run: str, x: str, ranks: Sequence[int] = (0,)) -> Curve:
        """The largest x and the mean loss of these ranks, at each moment that the page shows."""
        first, last = (int(at // GRID_S) for at in (self.page.start_s, self.page.end_s))
        found = []
        for at_s in [number * GRID_S for number in range(first, last + 1)]:
            across = self.stands(run, ranks, WALL if x == ELAPSED else x, at_s)
            if x == ELAPSED:
                across = [at_s - self.first_start(run) for _ in across]
            losses = self.stands(run, ranks, LOSS, at_s, FRESH_S)
            if across and losses:
                found.append((max(across), sum(losses) / len(losses)))
        return found

    def first_start(self, run: str) -> float:
        starts = (self.sent[each] for each in self.sent if each[0] == run and each[2] == START)
        return min(value for samples in starts for _, value in samples)


def _ns(at_s: float) -> int:
    return round(at_s * 1000) * 1_000_000


@pytest.fixture(scope="module")
def past(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Past]:
    with Prometheus(binaries, tmp_path_factory.mktemp("compare")) as prometheus:
        past = Past(prometheus)
        for attempt in ATTEMPTS:
            past.live(attempt)
        yield past
        past.close()


def drawn_of(
    past: Past, title: str, by: Sequence[str], **wanted: Sequence[str]
) -> dict[str, Curve]:
    """The pairs x and y of a panel of Compare at each moment that has both, by these labels."""
    asked = board(json.loads((FOLDER / "compare.json").read_text()))
    if wanted["x"] == (ELAPSED,):
        (x,) = (each for each in asked.variables if each.name == "x")
        wanted["x"] = [each.value for each in x.options if each.text.startswith(ELAPSED)]
    values = opened(asked, past.page, **wanted)
    x, y = (
        moments_of(answer(each, values, past.page), by)
        for ref in "xy"
        for each in asked.questions
        if (each.panel, each.ref) == (title, ref)
    )
    # A mean of several is not the same to its last digit in whichever order.
    return {
        curve: [(x[curve][at], round(y[curve][at], 9)) for at in sorted(x[curve].keys() & y[curve])]
        for curve in y
    }


def moments_of(found: Iterable[Series], by: Sequence[str]) -> dict[str, dict[float, float]]:
    return {" ".join(each.labels[label] for label in by): dict(each.points) for each in found}


def rounded(curve: Curve) -> Curve:
    return [(x, round(y, 9)) for x, y in curve]


BESIDE = "$name against ${x:text}"


@pytest.mark.parametrize("x", ALL_X)
@pytest.mark.parametrize("runs", [("early", "late"), ("resumed",), ("rarely",), (ALL,)], ids=str)
def test_each_run_has_one_curve_of_what_it_logged(
    past: Past, runs: tuple[str, ...], x: str
) -> None:
    curves = drawn_of(past, BESIDE, ["curve"], run=runs, x=(x,))

    chosen = {each.run: each.group for each in ATTEMPTS if each.run in runs or runs == (ALL,)}
    assert curves == {
        f"{group} · {run}": rounded(past.moments(run, x)) for run, group in chosen.items()
    }


@pytest.mark.parametrize("x", ALL_X)
def test_several_ranks_of_a_run_are_one_mean(past: Past, x: str) -> None:
    curves = drawn_of(past, BESIDE, ["curve"], run=("several",), rank=(ALL,), x=(x,))

    assert curves == {"g1 · several": rounded(past.moments("several", x, (0, 1, 2)))}


@pytest.mark.parametrize("x", ALL_X)
def test_the_band_of_a_group_is_over_each_of_its_ranks_in_stretches(past: Past, x: str) -> None:
    title = f"{BESIDE}, all that is selected"

    curves = drawn_of(past, title, ["run", "rank"], run=("several",), rank=(ALL,), x=(x,))

    assert curves == {
        f"several {rank}": [
            (math.floor(at / WIDTH + 0.5) * WIDTH, round(loss, 9))
            for at, loss in past.moments("several", x, (rank,))
        ]
        for rank in range(3)
    }
