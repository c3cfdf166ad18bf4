"""Steps that are captured in a CUDA graph: each replay is a step, and the capture is none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.optim import SGD

from conftest import Journal
from device_sim.graph_hooks import NAMES, GraphHooks
from measured import Measured, OneOf, Slow
from otel_ddp.diagnosis.steps import Step
from otel_ddp.torch import measure
from otel_ddp.vocabulary.words import PHASES

BATCH = torch.ones(8, 4)
GRAPH, COMPILE, UNMEASURED = (PHASES[word] for word in ("graph", "compile", "unmeasured"))
# Of a step: forward and backward, by `Slow`. A replay takes as long.
STEP_S = 3


class Graph:
    """Captured on the host, where what is captured runs as well."""


class Training(Measured):
    def __init__(self, place: Path, hooks: GraphHooks, every: int = 0) -> None:
        super().__init__(place)
        self.hooks, self.capturing = hooks, False
        self.model = Slow(self)
        self.optimizer = SGD(self.model.parameters(), lr=0.01)
        measure.start(self.model, self.progress, lambda _: None, every=0)
        assert measure._current is not None
        self.stepper = measure._current.stepper
        if every:
            self.stepper.cost.budget = OneOf(every)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(BATCH).sum().backward()
        self.optimizer.step()

    def capture(self, *acts: Callable[[], None]) -> Graph:
        graph = Graph()
        self.capturing = True
        self.hooks.run("capture_start", graph)
        for act in acts:
            act()
        self.capturing = False
        self.hooks.run("capture_end", graph)
        return graph

    def replay(self, graph: Graph) -> None:
        self.hooks.run("replay_start", graph)
        self.spend(STEP_S)
        self.hooks.run("replay_end", graph)

    def steps(self) -> list[Step]:
        self.progress.flush()
        return Journal(self.recorder.writer.path).steps

    def samples(self) -> int:
        return self.progress.work.samples


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> GraphHooks:
    found = GraphHooks()
    for name in NAMES:
        register = partial(found.register, name)
        monkeypatch.setattr(torch.cuda.graphs, f"register_graph_{name}_hook", register)
    return found


@pytest.fixture
def training(
    tmp_path: Path, hooks: GraphHooks, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Training]:
    found = Training(tmp_path, hooks)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    yield found
    found.close()


def test_each_replay_is_a_step_and_the_capture_is_none(training: Training) -> None:
    for _ in range(3):
        training.step()
    graph = training.capture(training.step)
    for _ in range(5):
        training.replay(graph)
    training.step()

    found = training.steps()
    assert [each.number for each in found] == [*range(1, 10)]
    # The first of them has the capture in it, which is compiling.
    assert COMPILE in found[3].parts.codes
    assert {each.took_ns for each in found[4:8]} == {STEP_S * 10**9}
    assert all(GRAPH in each.parts.codes for each in found[3:8])
    assert all(GRAPH not in each.parts.codes for each in (*found[:3], found[8]))
    assert training.samples() == 9 * len(BATCH)


@pytest.mark.parametrize("each", [1, 2])
def test_a_replay_makes_as_many_steps_as_its_graph_has(training: Training, each: int) -> None:
    training.step()
    graph = training.capture(*[training.step] * each)
    for _ in range(3):
        training.replay(graph)

    assert training.progress.steps.count == 1 + 3 * each
    assert training.samples() == (1 + 3 * each) * len(BATCH)


def test_a_graph_without_an_optimizer_makes_no_step(training: Training) -> None:
    training.step()
    graph = training.capture(lambda: training.model(BATCH).sum().backward())
    for _ in range(3):
        training.replay(graph)
        training.optimizer.step()

    assert training.progress.steps.count == 4


def test_after_a_capture_that_failed_steps_go_on(training: Training) -> None:
    training.step()
    training.capturing = True
    training.hooks.run("capture_start", Graph())
    training.model(BATCH)
    # Torch does not call the hook of the end.
    training.capturing = False
    for _ in range(2):
        training.step()

    assert training.progress.steps.count == 3


def test_status_says_that_steps_are_replayed_as_long_as_they_are(training: Training) -> None:
    training.step()
    graph = training.capture(training.step)
    training.replay(graph)
    assert training.stepper.replays
    training.step()
    assert not training.stepper.replays


@pytest.mark.parametrize("each", [1, 2])
def test_replays_are_counted_where_their_phases_are_not_measured(
    tmp_path: Path, hooks: GraphHooks, monkeypatch: pytest.MonkeyPatch, each: int
) -> None:
    with closing(Training(tmp_path, hooks, every=4)) as training:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: training.capturing)
        training.step()
        training.step()
        graph = training.capture(*[training.step] * each)
        for _ in range(150):
            training.replay(graph)

        found, steps = training.steps(), 2 + 150 * each
        assert [step.number for step in found] == [1, *range(2, steps + 1, each)]
        assert any(UNMEASURED in step.parts.codes for step in found)
        assert all(step.took_ns >= STEP_S * 10**9 for step in found)
        assert training.samples() == steps * len(BATCH)


def test_hooks_are_removed_with_the_others(training: Training) -> None:
    measure.stop(None)

    assert not any(training.hooks._hooks.values())
