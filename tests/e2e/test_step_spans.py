"""Training steps of two ranks as spans at a collector: sampled ones, and odd ones with a reason."""

from __future__ import annotations

import socket
from typing import Any, NamedTuple

import pytest

from node import Node, finished
from otlp_receiver import Receiver

# What a launcher that has traces of its own tells its ranks.
LAUNCHER = (bytes.fromhex("4f" * 16), bytes.fromhex("5a" * 8))
EVERY, STEPS = 10, 30
SLOW, LATE, CHECKPOINT, LAST = 23, 25, 28, 30

TRAIN = """
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

STEPS, SLOW, LATE, CHECKPOINT, LAST = 30, 23, 25, 28, 30
dist.init_process_group("gloo")
rank = dist.get_rank()
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = otel_ddp.instrument(model, group="g", run="r")


def batches():
    for step in range(1, STEPS + 1):
        # Steps of two lengths: what is slow here takes more than a machine's hiccup.
        time.sleep(0.1 if step % 2 == 0 else 0.05)
        if (rank, step) == (1, SLOW):
            time.sleep(0.5)
        yield step, torch.ones(4, 4)


for step, batch in otel_ddp.data(batches()):
    run.log({"rate": 0.01}, step=step)
    if step == LAST:
        with run.span("augment", kind="flip"):
            pass
    model(batch).sum().backward()
    if (rank, step) == (1, LATE):
        time.sleep(0.5)
    if (rank, step) == (0, CHECKPOINT):
        with run.phase("checkpoint"):
            time.sleep(0.01)
    optimizer.step()
    optimizer.zero_grad()
run.finish()
dist.destroy_process_group()
"""


class Span(NamedTuple):
    """One span as the collector sees it."""

    name: str
    trace: bytes
    id: bytes
    parent: bytes
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]

    @property
    def key(self) -> tuple[int, int]:
        """The step and the rank."""
        return self.attributes["step"], int(self.attributes["rank"])

    @property
    def reasons(self) -> list[str]:
        return str(self.attributes["reason"]).split(",")

    @property
    def took_ns(self) -> int:
        return self.ended_ns - self.began_ns


class Spans:
    """All of them, and which belong together."""

    def __init__(self, receiver: Receiver) -> None:
        self.all = [
            Span(
                *(each.name, each.trace_id, each.span_id, each.parent_span_id),
                *(each.start_time_unix_nano, each.end_time_unix_nano),
                {
                    pair.key: getattr(pair.value, pair.value.WhichOneof("value"))
                    for pair in each.attributes
                },
            )
            for each in receiver.spans()
        ]
        self.steps = {each.key: each for each in self.all if each.name == "step"}
        self.runs = [each for each in self.all if each.name == "run"]
        self.links = {
            each.span_id: [(link.trace_id, link.span_id) for link in each.links]
            for each in receiver.spans()
        }
        self.exemplars = [
            exemplar
            for point in receiver.points()
            if point.metric == "training.step.duration"
            for exemplar in point.value.exemplars
        ]

    def children(self, step: Span) -> list[Span]:
        found = [each for each in self.all if each.parent == step.id]
        return sorted(found, key=lambda each: each.began_ns)

    def longest(self, step: int, rank: int) -> str:
        """The phase that a step was in for longest."""
        return max(self.children(self.steps[step, rank]), key=lambda each: each.took_ns).name


@pytest.fixture(scope="module")
def spans() -> Spans:
    """What one launch of two ranks sent."""
    around = f"00-{LAUNCHER[0].hex()}-{LAUNCHER[1].hex()}-01"
    env = {"OTEL_DDP_SAMPLE_STEPS": str(EVERY), "TRACEPARENT": around}
    with Node(**env) as node, Receiver() as receiver:
        node.export_to(receiver.start_http())
        script = node.root / "train.py"
        script.write_text(TRAIN)
        finished(node.torchrun(2, str(script)))
        # The last step is sampled on both ranks, and all before it have been sent before it.
        last = {(STEPS, 0), (STEPS, 1)}
        assert receiver.wait_for(lambda r: last <= Spans(r).steps.keys() and _ended(Spans(r)))
        return Spans(receiver)


def _ended(spans: Spans) -> bool:
    return len(spans.runs) == 2 and len(spans.exemplars) > 0


def test_sampled_steps_of_all_ranks_share_a_trace_a_step(spans: Spans) -> None:
    sampled = {key: span for key, span in spans.steps.items() if "sampled" in span.reasons}

    assert sampled.keys() == {(step, rank) for step in (10, 20, 30) for rank in (0, 1)}
    traces = {step: {sampled[step, rank].trace for rank in (0, 1)} for step in (10, 20, 30)}
    assert [len(each) for each in traces.values()] == [1, 1, 1]
    assert len(set.union(*traces.values())) == 3


def test_a_step_and_its_phases_carry_the_labels_and_the_step(spans: Spans) -> None:
    for (number, rank), step in spans.steps.items():
        labels = {
            "group": "g",
            "run": "r",
            "job_type": "train",
            "node": socket.gethostname(),
            "rank": str(rank),
            "local_rank": str(rank),
            "step": number,
        }
        for span in (step, *spans.children(step)):
            assert labels.items() <= span.attributes.items()
            assert span.trace == step.trace


def test_the_phases_of_a_step_follow_one_another_from_its_beginning_to_its_end(
    spans: Spans,
) -> None:
    for step in spans.steps.values():
        children = spans.children(step)

        edges = [step.began_ns, *(each.ended_ns for each in children)]
        assert [each.began_ns for each in children] == edges[:-1]
        assert edges[-1] == step.ended_ns
        assert sum(each.took_ns for each in children) == step.took_ns
        names = {each.name for each in children}
        assert names >= {"data", "forward", "backward", "comm_wait", "optimizer"}


def test_a_step_that_a_slow_rank_holds_up_is_slow_on_both(spans: Spans) -> None:
    for rank in (0, 1):
        assert "slow" in spans.steps[SLOW, rank].reasons
    assert spans.steps[SLOW, 0].trace == spans.steps[SLOW, 1].trace
    assert spans.longest(SLOW, 1) == "data"
    assert spans.longest(SLOW, 0) == "comm_wait"


def test_a_step_with_a_checkpoint_is_there_on_the_rank_that_wrote_it(spans: Spans) -> None:
    step = spans.steps[CHECKPOINT, 0]

    assert "checkpoint" in step.reasons
    assert "checkpoint" in [each.name for each in spans.children(step)]
    other = spans.steps.get((CHECKPOINT, 1))
    assert other is None or "checkpoint" not in other.reasons
    # What the user's `with` recorded itself is another span, in the same trace.
    inside = {each.id for each in spans.children(step)}
    own = next(each for each in spans.all if each.name == "checkpoint" and each.id not in inside)
    assert own.key == (CHECKPOINT, 0)
    assert own.trace == step.trace


def test_a_span_of_the_users_is_in_the_trace_of_the_step_that_it_was_in(spans: Spans) -> None:
    own = {each.key: each for each in spans.all if each.name == "augment"}

    assert own.keys() == {(LAST, 0), (LAST, 1)}
    for key, span in own.items():
        assert span.trace == spans.steps[key].trace
        assert span.attributes["kind"] == "flip"


def test_a_trace_has_one_first_span_and_all_others_are_below_it(spans: Spans) -> None:
    ids = {(each.trace, each.id) for each in spans.all}
    of_steps = {each.trace for each in spans.steps.values()}

    for trace in of_steps:
        (first,) = (each for each in spans.all if each.trace == trace and not each.parent)
        assert first.name == "global step"
    orphans = {each.name for each in spans.all if (each.trace, each.parent) not in ids}
    # Above the runs is the launcher's span, which the launcher itself sends.
    assert orphans == {"global step", "run"}


def test_the_runs_are_below_the_launchers_span_and_steps_lead_to_them(spans: Spans) -> None:
    assert {(each.trace, each.parent) for each in spans.runs} == {LAUNCHER}
    by_rank = {each.attributes["rank"]: each for each in spans.runs}
    for step in spans.steps.values():
        run = by_rank[step.attributes["rank"]]
        assert spans.links[step.id] == [(run.trace, run.id)]
        assert run.began_ns <= step.began_ns
        assert step.ended_ns <= run.ended_ns
    assert {each.attributes["state"] for each in spans.runs} == {"finished"}


def test_a_bucket_of_the_steps_duration_leads_to_a_step_of_that_length(spans: Spans) -> None:
    by_id = {step.id: step for step in spans.steps.values()}

    for each in spans.exemplars:
        step = by_id[each.span_id]
        assert (step.trace, step.ended_ns) == (each.trace_id, each.time_unix_nano)
        assert each.as_double == step.took_ns / 1e9
    slow = [by_id[each.span_id] for each in spans.exemplars if each.as_double > 0.5]
    assert {"slow" in each.reasons for each in slow} == {True}
