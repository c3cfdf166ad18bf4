"""What is said of a run on several nodes, on each of them: real ranks, real agents, a network."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import leftovers
import namespaces
from node import Node, until
from otlp_receiver import Receiver
from trainings import Training

SWITCH = "10.31.0.254"
_LAN_BITS = 24


def address(node: int) -> str:
    return f"10.31.0.{node + 1}"


class RealNode(Node):
    """A node with a network of its own; it is made and ended by its rig."""

    def __init__(self, switch: namespaces.Namespace, number: int) -> None:
        super().__init__()
        self.name, self.address = f"node-{number}", address(number)
        self.namespace = namespaces.Namespace(self.name)
        self._switch, self._port = switch, f"cable{number}"
        home = self.root / "home"
        home.mkdir()
        for variable in ("XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
            self.env.pop(variable, None)
        self.env["HOME"] = str(home)

    def start(self, *command: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        return super().start(*self.namespace.command, *command, env=env)

    def _answer(self, request: urllib.request.Request) -> bytes:
        return self.namespace.inside(lambda: super(RealNode, self)._answer(request))

    def status(self) -> str:
        """What `otel-ddp status` says here."""
        return self.namespace.inside(self.shown)

    def connect(self) -> None:
        """Lay a cable to the switch."""
        ends = f"{self._port} type veth peer name eth0 netns {self.namespace.pid}"
        self._switch.ip(f"link add {ends}")
        self._switch.ip(f"link set {self._port} master lan", f"link set {self._port} up")
        here = f"{self.address}/{_LAN_BITS}"
        self.namespace.ip(f"addr add {here} dev eth0", "link set eth0 up")

    def cut(self) -> None:
        """From now on, no packet comes through: also none that says that a process has ended."""
        # The port is taken out of the switch, as a switch further on would do: this end stays up.
        self._switch.ip(f"link set {self._port} nomaster")

    def restore(self) -> None:
        self._switch.ip(f"link set {self._port} master lan")


class Rig(Training):
    """Two ranks on each of two nodes, and the switch between them."""

    def __init__(self, folder: Path, nodes: list[RealNode], switch: namespaces.Namespace) -> None:
        super().__init__(folder, nodes)
        self.real, self.switch = nodes, switch

    def train(self, *options: str) -> None:
        """The ranks of all nodes train until `end`."""
        self.start(*options, MASTER_ADDR=address(0), GLOO_SOCKET_IFNAME="eth0")
        self.until_step(AT_STEP)


pytestmark = pytest.mark.timed

LATE_S = 0.02
# Some steps before the trouble: those that an agent does not compare, and some that it does.
AT_STEP = 60
SAMPLES = 4

LEADS = "this agent leads the run, with 1 other node: listens on port"
LED = "judged by the agent of node-0.*: connected to node-0"
ALONE = r"judged here, by the ranks of this node alone: "


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Skips where this machine cannot be several."""
    if why := namespaces.why_none():
        pytest.skip(f"no network namespaces here: {why}")
    with contextlib.ExitStack() as life:
        switch = namespaces.Namespace("switch")
        life.callback(switch.close)
        switch.ip(
            "link add lan type bridge",
            f"addr add {SWITCH}/{_LAN_BITS} dev lan",
            "link set lan up",
        )
        nodes = [RealNode(switch, number) for number in range(2)]
        for node in nodes:
            life.callback(node.namespace.close)
            life.enter_context(node)
            node.connect()
        yield Rig(tmp_path, nodes, switch)


def until_said(node: RealNode, pattern: str) -> float:
    """When the status of a node says this."""
    until(lambda: re.search(pattern, node.status()), f"{node.name} to say {pattern!r}")
    return time.monotonic()


def test_a_slow_node_is_named_on_every_node_and_then_missed_when_its_power_is_cut(rig: Rig) -> None:
    rig.train()
    one, other = rig.real
    began = time.monotonic()
    for rank in (2, 3):
        rig.trouble(rank, f"backward {LATE_S}")

    named = r"node-1 keeps the others waiting: its 2 ranks need \S+ ms longer in backward"
    named_s = [until_said(node, named) - began for node in (one, other)]

    assert max(named_s) < 20.0

    # Everything there ends at once, and the other node hears nothing of it.
    other.cut()
    leftovers.end(leftovers.NODE, other.root.name)
    began = time.monotonic()
    missed_s = until_said(one, r"node-1, with ranks 2, 3, has not been heard for") - began
    assert missed_s < 15.0


def test_a_cut_cable_between_agents_costs_no_step_and_no_value(rig: Rig) -> None:
    with Receiver() as receiver:
        one, other = rig.real
        # A collector that all nodes reach, and that no cut cable cuts off from the others.
        endpoint = rig.switch.inside(lambda: receiver.start_http(host=SWITCH))
        for node in rig.real:
            node.export_to(endpoint)
        # Ranks that wait for those of the other node would have to wait for the cable.
        rig.train("--by-node")
        until_said(one, LEADS)
        until_said(other, LED)

        other.cut()
        until_said(one, "node-1 not heard for")
        until_said(other, ALONE + "(lost|cannot reach)")
        rig.goes_on(20)
        other.restore()
        began = time.monotonic()
        assert until_said(other, LED) - began < 20.0

        last = rig.end()
        for node in rig.real:
            node.stop_agent()
        # A request whose answer the cable has swallowed is sent again.
        sent: dict[str, set[float]] = {}
        for point in receiver.points():
            if (point.metric, point.attributes.get("name")) == ("training.scalar", "samples"):
                sent.setdefault(point.attributes["rank"], set()).add(point.value)
    every_one = {SAMPLES * float(step) for step in range(1, last + 1)}
    assert sent == dict.fromkeys("0123", every_one)
