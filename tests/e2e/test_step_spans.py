"""Sampled training steps of two ranks as spans at a collector, with what is around and in them."""

from __future__ import annotations

import socket
from typing import Any, NamedTuple

import pytest

from node import Node, finished
from otlp_receiver import Receiver

# What a launcher that has traces of its own tells its ranks.
LAUNCHER = (bytes.fromhex("4f" * 16), bytes.fromhex("5a" * 8))
EVERY, STEPS = 10, 20

TRAIN = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

STEPS = 20
dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
run = otel_ddp.instrument(model, group="g", run="r")
for step in range(1, STEPS + 1):
    loss = model(torch.ones(4, 4)).sum()
    if step == STEPS:
        with run.span("augment", kind="flip"):
            pass
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    run.log({"rate": 0.01}, step=step)
run.finish()
dist.destroy_process_group()
"""


class Span(NamedTuple):
    """One span as the collector sees it."""

    name: str
    trace: bytes
    id: bytes
    parent: bytes
    attributes: dict[str, Any]

    @property
    def key(self) -> tuple[int, int]:
        """The step and the rank."""
        return self.attributes["step"], int(self.attributes["rank"])


class Spans:
    """All of them, and which belong together."""

    def __init__(self, receiver: Receiver) -> None:
        self.all = [
            Span(
                *(each.name, each.trace_id, each.span_id, each.parent_span_id),
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

    def children(self, step: Span) -> list[Span]:
        return [each for each in self.all if each.parent == step.id]


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
        assert receiver.wait_for(lambda r: (STEPS, 0) in Spans(r).steps and _whole(Spans(r)))
        return Spans(receiver)


def _whole(spans: Spans) -> bool:
    return len(spans.runs) == 2 and (STEPS, 1) in spans.steps


def test_sampled_steps_of_all_ranks_share_a_trace_a_step(spans: Spans) -> None:
    steps = (EVERY, STEPS)
    sampled = {
        key: span for key, span in spans.steps.items() if "sampled" in span.attributes["reason"]
    }

    assert sampled.keys() == {(step, rank) for step in steps for rank in (0, 1)}
    traces = [{sampled[step, rank].trace for rank in (0, 1)} for step in steps]
    assert [len(each) for each in traces] == [1, 1]
    assert traces[0] != traces[1]


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
        phases = spans.children(step)
        assert {each.name for each in phases} >= {"forward", "backward", "comm_wait", "optimizer"}
        for span in (step, *phases):
            assert labels.items() <= span.attributes.items()
            assert span.trace == step.trace


def test_a_span_of_the_users_is_in_the_trace_of_the_step_that_it_was_in(spans: Spans) -> None:
    own = {each.key: each for each in spans.all if each.name == "augment"}

    assert own.keys() == {(STEPS, 0), (STEPS, 1)}
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
    assert {each.attributes["state"] for each in spans.runs} == {"finished"}
