"""The nodes that one machine is made to be: what is true of them that the other tests rely on."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from node import until
from nodes.rig import RealNode, Rig, needed

PORT = 4000
# Answers each connection with the time, and keeps it open until it is killed.
SERVER = f"""
import socket, time
listening, kept = socket.create_server(("", {PORT})), []
while True:
    kept.append(listening.accept()[0])
    kept[-1].send(str(time.time()).encode())
"""


def ask(asking: RealNode, asked: RealNode) -> str:
    """What the server there answers; empty where nothing comes back in time."""

    def answer() -> str:
        try:
            with socket.create_connection((asked.address, PORT), 5.0) as there:
                return there.recv(100).decode()
        except (ConnectionRefusedError, TimeoutError):
            return ""

    return asking.namespace.inside(answer)


def served(node: RealNode, asking: RealNode) -> subprocess.Popen[str]:
    process = node.python(SERVER)
    until(lambda: ask(asking, node), "the server")
    return process


@pytest.fixture
def rig() -> Rig:
    needed()
    return Rig()


@pytest.mark.skipif(not os.access("/dev/net/tun", os.R_OK), reason="no /dev/net/tun")
def test_a_cable_may_take_its_time(rig: Rig) -> None:
    rig.delay_s = 0.05
    with rig:
        one, other = rig.nodes
        served(other, asking=one)
        began = time.monotonic()

        assert ask(one, other)

        # There and back, once to connect and once for the answer.
        assert time.monotonic() - began > 0.15


def test_a_clock_may_be_ahead() -> None:
    needed()
    with Rig(ahead_s={1: 3.0}) as rig:
        one, other = rig.nodes
        served(other, asking=one)
        before = time.time()

        ahead_s = float(ask(one, other)) - before

    assert 3.0 <= ahead_s < 3.0 + 5.0


def test_nothing_is_left_of_a_rig_whose_test_is_killed(tmp_path: Path) -> None:
    needed()
    told = tmp_path / "told"
    code = f"""
import os, pathlib, signal
from nodes.rig import Rig
with Rig() as rig:
    pids = [rig.switch.pid, *(node.namespace.pid for node in rig.nodes)]
    pathlib.Path({str(told)!r}).write_text(" ".join(map(str, pids)))
    os.kill(os.getpid(), signal.SIGKILL)
"""
    path = os.pathsep.join(map(str, (Path(__file__).parents[1], Path(__file__).parents[2])))
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path})

    held = [Path("/proc", pid, "ns/net") for pid in told.read_text().split()]

    assert len(held) == 3
    until(lambda: not any(each.exists() for each in held), "the end of the namespaces")
