"""Nodes with a network between them, made of one machine: addresses, host names, cables to cut.

Every node has a place, a home, an agent and ranks as the launcher of a job on several nodes would
start them. It needs root, and says where it cannot be: `nodes.rig.needed()`.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import pytest

import leftovers
import namespaces
from node import Node, until
from otlp_receiver import Receiver

T = TypeVar("T")

HERE = Path(__file__).parent
PROGRAM = HERE / "train.py"
SWITCH = "10.31.0.254"
_PORT = "29500"
_LAN_BITS = 24


def needed() -> None:
    """Skip the test where this machine cannot be several."""
    if why := namespaces.why_none():
        pytest.skip(f"no network namespaces here: {why}")


def address(node: int) -> str:
    return f"10.31.0.{node + 1}"


class RealNode(Node):
    """A node with a network of its own; it is made and ended by its rig."""

    def __init__(self, rig: Rig, number: int) -> None:
        super().__init__()
        self.name, self.number = f"node-{number}", number
        self.address = address(number)
        self.namespace = namespaces.Namespace(self.name)
        self._rig = rig
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

    def ranks(self, count: int, nodes: int, *program: str) -> None:
        """Start the ranks of this node as torchrun does: the same variables, without a launcher."""
        for local in range(count):
            rank = self.number * count + local
            said = {
                "RANK": rank,
                "LOCAL_RANK": local,
                "GROUP_RANK": self.number,
                "WORLD_SIZE": nodes * count,
                "LOCAL_WORLD_SIZE": count,
                "GROUP_WORLD_SIZE": nodes,
                "MASTER_ADDR": address(0),
                "MASTER_PORT": _PORT,
                "GLOO_SOCKET_IFNAME": "eth0",
                "PYTHONPATH": HERE.parent,
            }
            self.warm(*program, env={k: str(v) for k, v in said.items()})

    def cut(self) -> None:
        """From now on, no packet comes through: also none that says that a process has ended."""
        # The port is taken out of the switch, as a switch further on would do: this end stays up.
        self._rig.switch.ip(f"link set cable{self.number} nomaster")

    def restore(self) -> None:
        self._rig.switch.ip(f"link set cable{self.number} master lan")

    def power_off(self) -> None:
        """Everything here ends at once, and the other nodes hear nothing of it."""
        self.cut()
        leftovers.end(leftovers.NODE, self.root.name)

    def close(self) -> None:
        self.namespace.close()


class Rig:
    """Two nodes of two ranks each on one switch."""

    count = ranks = 2

    def __init__(self) -> None:
        self.nodes: list[RealNode] = []
        self._life = contextlib.ExitStack()

    def __enter__(self) -> Rig:
        with contextlib.ExitStack() as life:
            self.folder = Path(life.enter_context(tempfile.TemporaryDirectory(prefix="rig-")))
            self.switch = namespaces.Namespace("switch")
            life.callback(self.switch.close)
            self.switch.ip(
                "link add lan type bridge",
                f"addr add {SWITCH}/{_LAN_BITS} dev lan",
                "link set lan up",
            )
            for number in range(self.count):
                node = RealNode(self, number)
                life.callback(node.close)
                life.enter_context(node)
                self.nodes.append(node)
            self._lay_cables()
            self._life = life.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._life.close()

    def _lay_cables(self) -> None:
        for node in self.nodes:
            port = f"cable{node.number}"
            ends = f"{port} type veth peer name eth0 netns {node.namespace.pid}"
            self.switch.ip(f"link add {ends}")
            self.switch.ip(f"link set {port} master lan", f"link set {port} up")
            here = f"{node.address}/{_LAN_BITS}"
            node.namespace.ip(f"addr add {here} dev eth0", "link set eth0 up")

    def train(self, *options: str) -> None:
        """Start the ranks of all nodes; they train until `stop_at`."""
        for node in self.nodes:
            node.ranks(self.ranks, self.count, str(PROGRAM), str(self.folder), *options)

    def trouble(self, rank: int, what: str) -> None:
        """From its next step on: "backward 0.02" or "hang"."""
        new = self.folder / f"trouble-{rank}.new"
        new.write_text(what)
        new.rename(new.with_suffix(""))

    def stop_at(self, step: int) -> None:
        """Let all ranks end after this step, which none has reached yet."""
        new = self.folder / "run.stops_at.new"
        new.write_text(str(step))
        new.rename(new.with_suffix(""))

    def export_to(self, receiver: Receiver) -> None:
        """A collector that all nodes reach, and that no cut cable cuts off from the others."""
        endpoint = self.switch.inside(lambda: receiver.start_http(host=SWITCH))
        for node in self.nodes:
            node.export_to(endpoint)

    def steps(self) -> dict[int, int]:
        """By rank, how many steps it has made, from the journals that are there."""
        found = [each for node in self.nodes for each in node.processes()]
        return {each["rank"]: each["step"] or 0 for each in found if each["rank"] is not None}

    def until_step(self, step: int) -> None:
        """Until all ranks have made so many."""
        world = self.count * self.ranks

        def made() -> bool:
            steps = self.steps()
            return len(steps) == world and min(steps.values()) >= step

        until(made, f"step {step} of all ranks")
