"""What takes minutes to show of runs on several nodes; `make stress` runs it."""

from __future__ import annotations

import re
import time

import pytest

from nodes.rig import Rig, needed
from nodes.test_whole_run import ALONE, AT_STEP, LED, late, train, until_said

pytestmark = [pytest.mark.timed, pytest.mark.stress]

NAMED = r"keeps? the others waiting: "
# Balanced runs say nothing of their ranks in so many steps, on two, three and four nodes together.
STEPS = 6700
BUSY_S, EVERY_S = 10.0, 60.0


@pytest.fixture(autouse=True)
def _nodes_can_be_made() -> None:
    needed()


@pytest.mark.parametrize("nodes", [3, 4])
def test_a_slow_node_among_several_is_named_on_each_of_them(nodes: int) -> None:
    with Rig(nodes) as rig:
        train(rig)
        began = late(rig, *rig.of_node(1))

        said = r"node-1 keeps the others waiting: its 2 ranks need \S+ ms longer in backward"
        said_s = [until_said(node, said) - began for node in rig.nodes]

    assert max(said_s) < 20.0


def test_verdicts_go_on_after_a_long_cut_and_after_the_death_of_the_agent_that_leads() -> None:
    with Rig() as rig:
        one, other = rig.nodes
        train(rig)
        late(rig, *rig.of_node(1))
        for node in rig.nodes:
            until_said(node, "node-1 " + NAMED)

        other.cut()
        until_said(other, ALONE)
        until_said(one, r"node-1 has not been heard for [3-9]\d s")
        other.restore()
        began = time.monotonic()
        until_said(other, LED)
        assert until_said(other, "node-1 " + NAMED) - began < 20.0

        # TCP needs as long again until it tries once more.
        rig.until_step(max(rig.steps().values()) + 1)
        one.kill_agent()
        until_said(one, "node-1 " + NAMED)
        until_said(other, LED)
        until_said(other, "node-1 " + NAMED)


def test_nodes_judge_their_own_ranks_while_the_node_that_leads_is_gone() -> None:
    with Rig() as rig:
        one, other = rig.nodes
        # The ranks of one node need none of the other's to go on.
        train(rig, "--by-node")
        until_said(other, LED)

        one.power_off()

        until_said(other, ALONE)
        step = max(process["step"] for process in other.processes())
        late(rig, 3)
        until_said(other, r"rank 3 \(node-1\) " + NAMED)
        assert max(process["step"] for process in other.processes()) > step


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("nodes", [2, 3, 4])
def test_none_is_named_in_a_balanced_run_with_a_slow_network_a_busy_core_and_a_wrong_clock(
    nodes: int,
) -> None:
    with Rig(nodes, delay_s=0.01, ahead_s={nodes - 1: 3.0}) as rig:
        rig.train("--pace", "0.5")
        rig.until_step(AT_STEP)
        first, began = rig.nodes[0], time.monotonic()
        said: set[str] = set()

        def trained_on() -> bool:
            for node in rig.nodes:
                said.update(re.findall(f".*{NAMED}.*", node.status()))
            return min(rig.steps().values()) >= STEPS

        while not trained_on():
            since_s = (time.monotonic() - began) % EVERY_S
            if since_s > EVERY_S - BUSY_S:
                first.pin(0)
                burner = first.busy(0)
                time.sleep(BUSY_S)
                burner.kill()
                first.pin()
            else:
                time.sleep(1.0)

    assert said == set()
