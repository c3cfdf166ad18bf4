"""What is said of a run on several nodes, on each of them: real ranks, real agents, a network."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node import until
from nodes.rig import RealNode, Rig, two_nodes
from otel_ddp.history.directory import find_run
from otlp_receiver import Receiver

pytestmark = pytest.mark.timed

LATE_S = 0.02
# Some steps before the trouble: those that an agent does not compare, and some that it does.
AT_STEP = 60
SAMPLES = 4

LEADS = "this agent leads the run, with 1 other node: listens on port"
LED = "judged by the agent of node-0.*: connected to node-0"
ALONE = r"judged here, by the ranks of this node alone: "


@pytest.fixture
def rig() -> Iterator[Rig]:
    with two_nodes() as made:
        yield made


def until_said(node: RealNode, pattern: str) -> float:
    """When the status of a node says this."""
    until(lambda: re.search(pattern, node.status()), f"{node.name} to say {pattern!r}")
    return time.monotonic()


def until_linked(rig: Rig) -> None:
    one, other = rig.real
    until_said(one, LEADS)
    until_said(other, LED)


def train(rig: Rig, *options: str) -> None:
    rig.train(*options)
    rig.until_step(AT_STEP)


def test_a_slow_node_is_named_on_every_node_and_then_missed_when_its_power_is_cut(rig: Rig) -> None:
    train(rig)
    one, other = rig.real
    began = time.monotonic()
    for rank in (2, 3):
        rig.trouble(rank, f"backward {LATE_S}")

    named = r"node-1 keeps the others waiting: its 2 ranks need \S+ ms longer in backward"
    named_s = [until_said(node, named) - began for node in (one, other)]

    assert max(named_s) < 20.0

    other.power_off()
    began = time.monotonic()
    missed_s = until_said(one, r"node-1 has not been heard for .*; ranks 2, 3 were in") - began
    assert missed_s < 15.0


def test_a_cut_cable_between_agents_costs_no_step_and_no_value(rig: Rig) -> None:
    with Receiver() as receiver:
        one, other = rig.real
        rig.export_to(receiver)
        # Ranks that wait for those of the other node would have to wait for the cable.
        train(rig, "--by-node")
        until_linked(rig)

        other.cut()
        until_said(one, "node-1 not heard for")
        until_said(other, ALONE + "(lost|cannot reach)")
        rig.goes_on(20)
        other.restore()
        began = time.monotonic()
        assert until_said(other, LED) - began < 20.0

        last = rig.end()
        assert sent(rig, receiver) == every_one(last)


def sent(rig: Rig, receiver: Receiver) -> dict[str, set[float]]:
    """By rank, the values that the collector has in the end."""
    for node in rig.real:
        node.stop_agent()
    # A request whose answer the cable has swallowed is sent again.
    found: dict[str, set[float]] = {}
    for point in receiver.points():
        named = point.metric, point.attributes.get("name")
        if named == ("training.scalar", "samples"):
            found.setdefault(point.attributes["rank"], set()).add(point.value)
    return found


def every_one(last: int) -> dict[str, set[float]]:
    return {rank: {SAMPLES * float(step) for step in range(1, last + 1)} for rank in "0123"}


def kept(node: RealNode) -> dict[str, int]:
    """By rank, how many of its values the history on this node has."""
    with find_run("", Path(node.env["OTEL_DDP_HISTORY_DIR"])) as run:
        found = [
            (series.key.rank, sum(each.finite for each in history.sums(series)))
            for history, series in run.series("value")
            if series.key.name == "samples"
        ]
        assert len(run.histories) == 1
        assert [each["why"] for each in run.about.get("gaps") or ()] == []
    return dict(found)


def test_the_lead_keeps_each_value_of_the_other_node_whichever_agent_is_killed(
    rig: Rig,
) -> None:
    one, other = rig.real
    train(rig)
    until_linked(rig)
    for killed in (other, one):
        killed.kill_agent()
        until_linked(rig)
        rig.goes_on(20)

    last = rig.end()

    everything = {"2": last, "3": last}
    until(lambda: everything.items() <= kept(one).items(), "all values of node-1")


@pytest.mark.stress
def test_agents_that_are_killed_and_a_cable_that_is_cut_in_turn_cost_no_value(rig: Rig) -> None:
    with Receiver() as receiver:
        one, other = rig.real
        rig.export_to(receiver)
        train(rig, "--by-node")
        until_linked(rig)
        for killed in ([other], [one], [], [one, other]):
            for node in killed:
                node.kill_agent()
            if not killed:
                other.cut()
                until_said(other, ALONE + "(lost|cannot reach)")
                rig.goes_on(600)
                other.restore()
            until_linked(rig)
            rig.goes_on(AT_STEP)

        last = rig.end()
        until(lambda: kept(one) == dict.fromkeys("0123", last), "all values of both nodes")
        assert kept(other) == dict.fromkeys("23", last)
        assert sent(rig, receiver) == every_one(last)
