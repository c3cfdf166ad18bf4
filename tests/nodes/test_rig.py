"""The nodes that one machine is made to be: what is true of them that the other tests rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from node import until
from nodes.rig import needed


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
