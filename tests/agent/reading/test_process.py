"""A process from its journal to the ledger: labels, values, steps; what survives a restart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from fed import IDENTITY, Fed
from otel_ddp.agent.export.otlp.render import Renderer
from otel_ddp.agent.reading.documents import RunDescription
from otel_ddp.agent.reading.journals import NodeNames
from otel_ddp.journal import layout
from otel_ddp.journal.writer import Shape
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import RANK_LABELS, STATES

MS_NS = 10**6


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    Fed.close_all()


@pytest.fixture
def bench(tmp_path: Path) -> Fed:
    return Fed(tmp_path)


def test_a_process_that_never_learns_its_rank_is_exported_when_it_ends(tmp_path: Path) -> None:
    bench = Fed(tmp_path, {**IDENTITY, "global_rank": None, "settled": False})
    bench.log({"loss": 1.0}, step=1)

    bench.read(alive=False)

    assert bench.values(catalog.TRAINING_SCALAR) == {"loss/train": 1.0}
    assert dict(bench.process.labels)["rank"] == f"p{bench.process.reader.pid}"


def test_a_process_that_waits_for_its_group_is_not_exported_under_a_provisional_name(
    tmp_path: Path,
) -> None:
    bench = Fed(tmp_path, {**IDENTITY, "run": "provisional", "settled": False})
    bench.log({"loss": 1.0}, step=1)

    bench.poll()
    before = list(bench.ledger.families())
    bench.writer.document(layout.IDENTITY, IDENTITY)
    bench.poll()

    assert before == []
    assert bench.values(catalog.TRAINING_SCALAR) == {"loss/train": 1.0}
    assert dict(bench.process.labels)["run"] == "r"


def test_a_rank_that_is_not_exported_leaves_no_training_series(tmp_path: Path) -> None:
    bench = Fed(tmp_path, {**IDENTITY, "exported": False})
    bench.log({"loss": 1.0}, step=4)

    bench.poll()

    assert list(bench.ledger.families()) == []
    assert bench.process.describe().step == 4


def test_the_step_of_a_training_is_not_that_of_a_tracker_which_counts_frames(bench: Fed) -> None:
    bench.rank.state("running")
    bench.log({"charts/reward": 1.0}, step=5500)
    bench.poll()
    without = bench.process.step(), bench.process.describe().step
    bench.writer.add(bench.writer.counter(catalog.TRAINING_STEPS.name, {}), 12.0)
    bench.writer.step(12)
    bench.poll()

    assert without == (5500, 5500)
    assert (bench.process.step(), bench.process.describe().step) == (12, 12)


def test_an_agent_that_starts_again_shows_old_values_and_sends_only_new_ones(bench: Fed) -> None:
    bench.log({"once": 42.0}, step=1)
    bench.poll()
    bench.exports.reader.commit(*bench.process.reader.bookmark())
    bench.log({"loss": 2.0}, step=2)

    bench.start_again()
    bench.poll()

    assert bench.values(catalog.TRAINING_SCALAR) == {"once/train": 42.0, "loss/train": 2.0}
    assert {name: len(points) for name, points in bench.sent().items()} == {"once": 0, "loss": 1}


def test_a_value_that_was_finite_before_the_agent_came_may_be_lost_afterwards(bench: Fed) -> None:
    bench.rank.state("running")
    bench.log({"loss": 0.4}, step=1)
    bench.poll()
    bench.exports.reader.commit(*bench.process.reader.bookmark())
    bench.start_again()
    bench.poll()
    bench.log({"loss": float("nan")}, step=2)
    bench.poll(alive=False)

    (found,) = bench.process.nonfinite(time.time_ns())
    assert (found.name, found.step, found.finite_step) == ("loss", 2, 1)


@pytest.mark.parametrize("was_there", [False, True], ids=["not there yet", "paused"])
def test_a_process_that_died_without_an_agent_ended_when_it_wrote_last(
    bench: Fed, was_there: bool
) -> None:
    bench.rank.state("running")
    if was_there:
        bench.read(after_s=-60)
    bench.log({"loss": 1.0}, step=1)
    wrote_ns = time.time_ns()

    bench.read(alive=False)

    life = bench.process.life
    assert bench.writer.created_ns < life.ended_ns <= wrote_ns < life.gone_ns
    assert life.seen_alive_ns == life.ended_ns


def test_values_that_come_too_fast_for_too_long_are_counted_and_the_last_one_is_shown(
    bench: Fed,
) -> None:
    at_ns = time.time_ns()
    # As after a minute of them: the last point is 59,999 ms ahead.
    bench.log({"x": 0.0}, step=0, at_ns=at_ns + 59_999 * MS_NS)
    for number in (1, 2, 3):
        bench.log({"x": float(number), "y": 1.0}, number, at_ns)
    bench.poll()

    assert list(bench.sent()["x"]) == [0.0, 1.0]
    assert list(bench.sent(catalog.TRAINING_SCALAR_STEP)["x"]) == [0.0, 1.0]
    assert len(bench.sent()["y"]) == 1
    assert bench.values(catalog.OTEL_DDP_RECORDS_LOST)["too_fast"] == 2.0
    assert bench.values(catalog.TRAINING_SCALAR)["x/train"] == 3.0
    assert bench.values(catalog.TRAINING_SCALAR_STEP)["x/train"] == 3.0


def test_every_rank_has_its_world_size_and_only_rank_0_describes_the_run(
    bench: Fed, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = Fed(tmp_path / "other", {**IDENTITY, "global_rank": 1})

    for each in (bench, other):
        each.poll()

    assert [each.values(catalog.TRAINING_WORLD_SIZE) for each in (bench, other)] == [{"": 2.0}] * 2
    started = [each.values(catalog.TRAINING_RUN_START_TIMESTAMP) for each in (bench, other)]
    assert [bool(each) for each in started] == [True, False]


def test_the_last_value_of_a_name_survives_an_overrun(
    bench: Fed, caplog: pytest.LogCaptureFixture
) -> None:
    bench.log({"once": 42.0}, step=1)
    shape = Shape([bench.writer.name("loss", "train")])
    before_ns = time.time_ns()
    for step in range(5000):
        bench.writer.scalars(shape, time.time_ns(), step, float("nan"), [float(step)])

    bench.poll()

    # The history has the time as a gap.
    ((since_ns, until_ns),) = bench.process.new.overwritten
    assert since_ns <= before_ns < until_ns <= time.time_ns()
    assert bench.values(catalog.TRAINING_SCALAR) == {"once/train": 42.0, "loss/train": 4999.0}
    lost = bench.values(catalog.OTEL_DDP_RECORDS_LOST)["overwritten"]
    sent = sum(map(len, bench.sent().values()))
    assert lost > 0
    assert lost + sent == 5001
    # It is in the log at once, and no second time in the next polls.
    bench.poll()
    (said,) = [each for each in caplog.messages if "were overwritten before they were read" in each]
    assert said.startswith("Records of rank 0 of run ")


def test_the_runs_info_says_all_that_is_known(tmp_path: Path) -> None:
    said = {"name": "seventh try", "description": "a wider net", "project": "vision"}
    bench = Fed(tmp_path, {**IDENTITY, **said})
    bench.poll()
    bench.writer.document(layout.CONFIG, {"lr": 0.1, "net.depth": 3, "net_depth": 4, "amp": True})
    bench.writer.document(layout.FACTS, {"model": "Net"})

    bench.poll()

    (info,) = [dict(series.labels) for series in bench.rows(catalog.TRAINING_RUN_INFO)]
    assert info.items() >= {**said, "model": "Net"}.items()
    assert (info["config_lr"], info["config_amp"]) == ("0.1", "true")
    # Two keys that Prometheus would spell alike: the first one keeps the label.
    assert info["config_net_depth"] == "3"


def test_a_description_has_the_driver_and_counts_the_boards_of_the_node(tmp_path: Path) -> None:
    bench = Fed(tmp_path)
    devices = {"gpu_driver": "550.54", "gpus": [{"name": "NVIDIA H100"}] * 2}

    described = RunDescription(bench.process.reader, lambda: devices).environment()

    assert (described["gpu_driver"], described["gpus"]) == ("550.54", "2 x NVIDIA H100")


def test_each_setting_and_all_of_the_environment_is_a_series_until_it_changes(
    tmp_path: Path,
) -> None:
    bench = Fed(tmp_path, {**IDENTITY, "name": "mine", "description": "d" * 900})
    versions = {"python": "3.11.7", "torch": "2.4", "device_runtime": "CUDA 12.8"}
    facts = {"script": "t.py", **versions, "slurm_job_id": "77"}
    bench.writer.document(layout.FACTS, facts)
    bench.writer.document(layout.CONFIG, {"lr": None})
    bench.poll()

    expected = {**facts, "name": "mine", "config.lr": "None", "description": "d" * 199 + "…"}
    settings = bench.values(catalog.TRAINING_RUN_SETTING)
    assert {f"{key}/{value}" for key, value in expected.items()} <= settings.keys()
    bench.writer.document(layout.FACTS, {"torch": "2.5"})
    bench.poll(after_s=4)
    settings = bench.values(catalog.TRAINING_RUN_SETTING)
    assert ("torch/2.4" in settings, settings["torch/2.5"]) == (False, 1.0)


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("ValueError: a: b", {"ValueError": 1.0}),
        ("KeyboardInterrupt", {"KeyboardInterrupt": 1.0}),
        ("the loss diverged", {}),
    ],
)
def test_an_exception_that_ended_training_is_counted_by_its_class(
    bench: Fed, reason: str, told: dict[str, float]
) -> None:
    bench.writer.reason(reason)
    bench.writer.state(STATES["failed"], 1)
    bench.poll()

    assert bench.values(catalog.TRAINING_EXCEPTIONS) == told


def test_a_process_with_a_newer_one_of_the_same_labels_writes_no_series(bench: Fed) -> None:
    bench.writer.phase(2, 0, 1)
    bench.writer.state(1, 1)
    bench.poll()
    before = bench.values(catalog.TRAINING_PHASE)
    bench.writer.phase(3, 0, 2)

    bench.read()
    bench.exports.update_series(time.time_ns(), is_newest=False)

    assert bench.values(catalog.TRAINING_PHASE) == before == {"": 2.0}


def step_spans(*numbers: int) -> list[tuple[str, int]]:
    return [(name, each) for each in numbers for name in ("step", "forward", "comm_wait")]


def test_steps_leave_as_spans_with_the_six_labels(bench: Fed) -> None:
    bench.writer.document(layout.FACTS, {"span": {"id": "5a" * 8, "trace": f"id/{'4f' * 16}"}})
    bench.steps(99, 100, 101)

    bench.poll()

    assert bench.spans() == step_spans(100)
    documents = [(bench.process.labels, bench.process.project, bench.exports.documents)]
    (request,) = Renderer({}).documents(documents)
    message = ExportTraceServiceRequest.FromString(request.body)
    whole, *spans = message.resource_spans[0].scope_spans[0].spans
    for span in (whole, *spans):
        attributes = {pair.key: pair.value for pair in span.attributes}
        found = {name: attributes[name].string_value for name in RANK_LABELS}
        assert found == dict(bench.process.labels)
        assert attributes["step"].int_value == 100
    own = spans[0].span_id
    assert [span.parent_span_id for span in spans] == [whole.span_id, own, own]
    assert (whole.name, whole.parent_span_id) == ("global step", b"")
    # From a step to the span of its run.
    (link,) = spans[0].links
    assert (link.trace_id.hex(), link.span_id.hex()) == ("4f" * 16, "5a" * 8)


@pytest.mark.parametrize(
    ("state", "reason", "shown", "error"),
    [
        ("running", "", "killed", "killed"),
        ("failed", "ValueError: no", "failed", "ValueError: no"),
    ],
)
def test_a_run_is_a_span_that_is_sent_once_however_its_process_ended(
    bench: Fed, state: str, reason: str, shown: str, error: str
) -> None:
    own = {"id": "5a" * 8, "trace": f"id/{'4f' * 16}", "parent": "6b" * 8}
    bench.writer.document(layout.FACTS, {"span": own})
    ended_us = bench.writer.created_ns // 1000 + 7_000_000
    bench.writer.reason(reason)
    bench.writer.state(STATES[state], ended_us)
    bench.poll() if state == "running" else None
    assert bench.spans() == []

    for _ in range(2):
        bench.read(alive=False)

    (document,) = [each for each in bench.exports.documents if each.kind == layout.SPAN]
    content = document.content
    assert content["name"] == "run"
    assert own.items() <= content.items()
    assert content["start"] == bench.writer.created_ns
    if state != "running":
        assert content["end"] == ended_us * 1000
    assert (content["attributes"], content["error"]) == ({"state": shown}, error)


def test_a_process_decides_how_many_of_its_steps_are_spans(bench: Fed) -> None:
    bench.writer.document(layout.FACTS, {"sample_steps": 2})
    bench.steps(1, 2, 3, 4)

    bench.poll()

    assert bench.spans() == step_spans(2, 4)


def test_without_a_collector_no_documents_pile_up(bench: Fed) -> None:
    bench.ledger.keep_history = False
    bench.steps(100)
    bench.writer.append(layout.SPAN, b'{"name": "save"}')
    bench.poll()
    before = list(bench.exports.documents)

    # One is found: what comes from now on is kept for it.
    bench.ledger.keep_history = True
    bench.steps(200, 300)
    bench.writer.append(layout.SPAN, b'{"name": "save", "step": 1}')
    bench.poll()

    assert before == []
    assert bench.spans() == [*step_spans(200, 300), ("save", 1)]


class TestNodeNames:
    """What a node is called."""

    @pytest.mark.parametrize("order", [(0, 1), (1, 0)])
    def test_two_nodes_of_one_run_on_one_host_have_the_same_names_in_each_launch(
        self, tmp_path: Path, order: tuple[int, int]
    ) -> None:
        nodes = [node(rank) for rank in (0, 1)]
        names = NodeNames(tmp_path / "nodes.json", "", lambda: nodes)

        found = {rank: names.name(nodes[rank]) for rank in order}

        assert found == {0: "h", 1: "h-1"}
        assert [names.name(each) for each in nodes] == ["h", "h-1"]

    def test_a_second_node_that_comes_late_gets_a_name_of_its_own(self, tmp_path: Path) -> None:
        living = [node(1)]
        names = NodeNames(tmp_path / "nodes.json", "", lambda: living)
        first = names.name(node(1))

        living.append(node(0))

        # A name that was given is kept: else the series would jump.
        assert (first, names.name(node(0)), names.name(node(1))) == ("h", "h-0", "h")

    def test_names_outlast_the_agent_and_the_other_node(self, tmp_path: Path) -> None:
        first = NodeNames(tmp_path / "nodes.json", "", lambda: [node(0), node(1)])
        first.name(node(1))
        first.name(node(0))

        for living in ([node(0), node(1)], [node(0)], []):
            second = NodeNames(tmp_path / "nodes.json", "", lambda living=living: living)
            assert second.name(node(0)) == "h"
            assert second.name(node(1)) == "h-1"

    def test_a_name_that_the_user_gave_wins(self, tmp_path: Path) -> None:
        names = NodeNames(tmp_path / "nodes.json", "machine")

        assert names.name({"run": "a", "host": "h", "node": "mine", "node_rank": 0}) == "mine"
        assert names.name({"run": "a", "host": "h", "node_rank": 0}) == "machine"


def node(node_rank: int) -> dict[str, Any]:
    return {"run": "r", "host": "h", "node_rank": node_rank}
