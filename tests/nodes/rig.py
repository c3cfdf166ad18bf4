"""Nodes with a network between them, made of one machine: addresses, host names, cables to cut.

Every node has a place, a home, an agent and ranks as the launcher of a job on several nodes would
start them. It needs root.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import leftovers
import namespaces
from node import Node
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
        self.name, self.number = f"node-{number}", number
        self.address = address(number)
        self.namespace = namespaces.Namespace(self.name)
        self._switch, self._port = switch, f"cable{number}"
        self.home = self.root / "home"
        self.home.mkdir()
        for variable in ("XDG_DATA_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"):
            self.env.pop(variable, None)
        self.env["HOME"] = str(self.home)

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

    def power_off(self) -> None:
        """Everything here ends at once, and the other nodes hear nothing of it."""
        self.cut()
        leftovers.end(leftovers.NODE, self.root.name)

    def close(self) -> None:
        self.namespace.close()


class Rig(Training):
    """Two ranks on each of two nodes, and the switch between them."""

    def __init__(self, folder: Path, nodes: list[RealNode], switch: namespaces.Namespace) -> None:
        super().__init__(folder, nodes)
        self.real, self._switch = nodes, switch

    def train(self, *options: str) -> None:
        """Start the ranks of all nodes; they train until `end`."""
        self.start(*options, MASTER_ADDR=address(0), GLOO_SOCKET_IFNAME="eth0")

    def export_to(self, receiver: Receiver) -> None:
        """A collector that all nodes reach, and that no cut cable cuts off from the others."""
        endpoint = self._switch.inside(lambda: receiver.start_http(host=SWITCH))
        for node in self.nodes:
            node.export_to(endpoint)


@contextlib.contextmanager
def two_nodes() -> Iterator[Rig]:
    """Skips where this machine cannot be several."""
    if why := namespaces.why_none():
        pytest.skip(f"no network namespaces here: {why}")
    with contextlib.ExitStack() as life:
        folder = Path(life.enter_context(tempfile.TemporaryDirectory(prefix="rig-")))
        switch = namespaces.Namespace("switch")
        life.callback(switch.close)
        switch.ip(
            "link add lan type bridge",
            f"addr add {SWITCH}/{_LAN_BITS} dev lan",
            "link set lan up",
        )
        nodes = [RealNode(switch, number) for number in range(2)]
        for node in nodes:
            life.callback(node.close)
            life.enter_context(node)
            node.connect()
        yield Rig(folder, nodes, switch)
