"""The five programs that people bring, side by side in a real Prometheus: curves, and no alert."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from tools.dashboards.queries import Board, boards
from tools.stack.build import Binaries
from tools.stack.server import free_port

from node import Node, finished, until
from stack.asked import Page, answer, opened, options
from stack.faster import deployed
from stack.servers import CONFIGURATIONS, Collector, Prometheus, Series

EXAMPLES = Path(__file__).parents[2] / "examples"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LAUNCH = ("torch.distributed.launch", "--nproc-per-node", "2")
BOARDS = {board.title: board for board in boards()}


class Program(NamedTuple):
    """How a program is started that records two ranks, or one; and what it logs."""

    launcher: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    roles: tuple[str, ...] = ("train",)
    splits: tuple[str, ...] = ("train",)


PROGRAMS = {
    "from_swanlab": Program((), roles=("train", "worker")),
    "from_wandb": Program(TORCHRUN, ("--log_strategy", "all", "--group_name", "wandb")),
    "from_wandb_guide": Program(LAUNCH, ("--track", "all")),
    "from_em": Program(TORCHRUN, splits=("train", "val", "test")),
    "trainer_ddp": Program(TORCHRUN, splits=("train", "val", "test")),
}


# Reads what from_wandb has saved.
READER = "reader"
READ = """
import otel_ddp
with otel_ddp.init(run="reader") as run:
    run.log({{"loss": 1.0}}, step=1)
    run.artifact({path!r}, name="weights", type="model", direction="input")
    run.artifact("s3://bucket/report", type="report")
"""


class Played:
    """All programs have run on one node, under the deployed rules, twelve times as fast."""

    def __init__(self, binaries: Binaries, folder: Path, life: ExitStack) -> None:
        config = yaml.safe_dump(deployed(folder / "rules"))
        self.prometheus = life.enter_context(
            Prometheus(binaries, folder / "prometheus", config=config)
        )
        collector = life.enter_context(
            Collector(
                *(binaries, folder / "collector", CONFIGURATIONS / "all-in-one.yaml"),
                METRICS_URL=self.prometheus.otlp_metrics,
            )
        )
        # Its host is no part of the question, and a small one is busy.
        node = life.enter_context(Node(OTEL_DDP_SOURCES="none", CUDA_VISIBLE_DEVICES=""))
        node.export_to(collector.http)
        # Where programs leave what they save.
        node.env["OUTPUT"] = str(node.root)
        start_s = time.time()
        for name, program in PROGRAMS.items():
            launcher = ("-m", *program.launcher) if program.launcher else ()
            path = str(EXAMPLES / name / "train.py")
            port = {"MASTER_PORT": str(free_port()), "OTEL_DDP_RUN": name}
            finished(node.warm(*launcher, path, *program.arguments, env=port))
        node.run(READ.format(path=str(node.root / "model.pt")))
        until(self._have_ended, "the end of all programs")
        # Two of them save a model, and the reader names two.
        named = "count(training_artifact_timestamp_seconds) == 4"
        until(lambda: self.prometheus.query(named), "all artifacts")
        # Points are asked for at whole seconds: to the end of the one that has the last values.
        self.page = Page(self.prometheus, start_s, math.ceil(time.time()), 1.0)

    def _have_ended(self) -> bool:
        ended = self.prometheus.query("run:training_state:max == 2")
        return {each.labels["run"] for each in ended} == {*PROGRAMS, READER}

    def shown(self, board: Board, panel: str, ref: str, **wanted: tuple[str, ...]) -> list[Series]:
        """What a query of a panel brings, where the board is opened and this is chosen."""
        (asked,) = (q for q in board.questions if q.panel == panel and q.ref == ref)
        return answer(asked, opened(board, self.page, **wanted), self.page)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def played(binaries: Binaries, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    with ExitStack() as life:
        yield Played(binaries, tmp_path_factory.mktemp("programs"), life)


def test_no_alert_fires_about_any_of_them(played: Played) -> None:
    page = played.page
    fired = played.prometheus.query(
        f'last_over_time(ALERTS{{alertstate="firing"}}[{page.span_s:.0f}s])', at_s=page.end_s
    )

    assert [each.labels for each in fired] == []


def test_the_boards_offer_five_runs_and_the_roles_of_their_ranks(played: Played) -> None:
    for title in ("Runs", "Run", "Compare"):
        board = BOARDS[title]
        there = {
            name: options(variable, opened(board, played.page), played.page)
            for variable in board.variables
            for name in [variable.name]
            if name in ("run", "job_type")
        }

        assert sorted(there["run"]) == sorted([*PROGRAMS, READER])
        assert sorted(there["job_type"]) == ["train", "worker"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_run_shows_its_curves(played: Played, name: str) -> None:
    board, program = BOARDS["Run"], PROGRAMS[name]

    x = played.shown(board, "$name against step", "x", run=(name,))
    y = played.shown(board, "$name against step", "y", run=(name,))

    assert {each.labels["split"] for each in x} == set(program.splits)
    assert {each.labels["split"] for each in y} == set(program.splits)
    for each in x:
        steps = [value for _, value in each.points]
        assert steps == sorted(steps)
    assert played.shown(board, "$name over time", "A", run=(name,))


def test_compare_shows_a_curve_of_each_against_steps(played: Played) -> None:
    board = BOARDS["Compare"]

    against = [
        played.shown(board, "$name against ${x:text}", ref, run=tuple(PROGRAMS)) for ref in "xy"
    ]

    for curves in against:
        assert len(curves) == len(PROGRAMS)
        assert all(each.points for each in curves)


def test_run_lists_what_it_has_saved_with_size_and_digest(played: Played) -> None:
    (told,), (size,) = (
        played.shown(BOARDS["Run"], "Inputs and outputs", ref, run=("from_wandb",))
        for ref in ("told", "size")
    )

    assert told.labels == size.labels
    assert (told.labels["direction"], told.labels["name"]) == ("output", "model")
    assert re.fullmatch("[0-9a-f]{64}", told.labels["digest"])
    assert told.labels["uri"].endswith("/model.pt")


def test_run_draws_the_chain_from_the_run_that_wrote_to_the_one_that_read(played: Played) -> None:
    assert drawn(played, "from_wandb") == {
        ("from_wandb, this run", "model, model"),
        ("model, model", f"{READER}, read it"),
    }
    assert drawn(played, READER) == {
        ("from_wandb, wrote it", "weights, model"),
        ("weights, model", f"{READER}, this run"),
        (f"{READER}, this run", "report, report"),
    }


def drawn(played: Played, run: str) -> set[tuple[str, str]]:
    """The arrows between the circles, by what stands in and below these."""
    board = BOARDS["Run"]
    nodes, edges = (
        [each.labels for each in played.shown(board, "Where from, where to", ref, run=(run,))]
        for ref in ("nodes", "edges")
    )
    names = {each["id"]: f"{each['title']}, {each['subtitle']}" for each in nodes}
    assert len(names) == len(nodes)
    assert len({each["id"] for each in edges}) == len(edges)
    return {(names[each["source"]], names[each["target"]]) for each in edges}
