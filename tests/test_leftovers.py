"""What a test starts ends with it: also where its set-up fails or hangs, or tests are killed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from node import until

# A parent with a child in a session of its own, as torchrun has them; neither ends by itself.
PROGRAM = """
import os, subprocess, sys
child = [sys.executable, "-c", "import time; time.sleep(600)"]
other = subprocess.Popen(child, start_new_session=True)
print(os.getpid(), other.pid, flush=True)
sys.stdin.read()
"""
# The second is a fork of a process that has imported torch.
STARTS = {
    "as users do": "node.start(sys.executable, str(HERE / 'program.py'))",
    "warm": "node.warm(str(HERE / 'program.py'))",
}

FILE = """
import os, sys, time
from pathlib import Path
import pytest
import warm
from node import Node

HERE = Path(__file__).parent
# Before a timeout counts: importing torch takes longer than that.
{first}


@pytest.fixture(scope="module")
def launch():
    with Node() as node:
        process = {start}
        (HERE / "root").write_text(str(node.root))
        (HERE / "pids.new").write_text(process.stdout.readline())
        (HERE / "pids.new").rename(HERE / "pids")
        {then}
        yield


def test_that_needs_it(launch):
    pass
"""


def pytest_whose_set_up(start: str, then: str, folder: Path) -> subprocess.Popen[str]:
    """pytest with one test, whose set-up starts the program like this and goes on like that."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "test_it.py").write_text(
        FILE.replace("{first}", "warm.python()" if start == "warm" else "")
        .replace("{start}", STARTS[start])
        .replace("{then}", then)
    )
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider"),
            *("-c", os.devnull, "-o", "timeout=5", str(folder / "test_it.py")),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left(folder: Path) -> list[str]:
    """Those of the program and its child that are still there."""
    return [pid for pid in (folder / "pids").read_text().split() if runs(pid)]


def runs(pid: str) -> bool:
    # One that has ended is there until its parent, or the system, takes note of it.
    try:
        return "\nState:\tZ" not in Path("/proc", pid, "status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    "then", [pytest.param("raise RuntimeError", marks=pytest.mark.stress), "time.sleep(600)"]
)
def test_a_set_up_that_fails_leaves_nothing_behind(start: str, then: str, tmp_path: Path) -> None:
    with pytest_whose_set_up(start, then, tmp_path) as tests:
        output, _ = tests.communicate()

    assert "1 error" in output
    assert "processes behind" not in output
    assert left(tmp_path) == []


@pytest.mark.parametrize("start", STARTS)
def test_tests_that_are_killed_leave_nothing_behind(start: str, tmp_path: Path) -> None:
    with pytest_whose_set_up(start, "time.sleep(600)", tmp_path) as tests:
        until((tmp_path / "pids").exists, "the program and its child")
        assert len(left(tmp_path)) == 2
        tests.kill()

    until(lambda: left(tmp_path) == [], "the end of both")
    # Files outlive a process that is killed.
    shutil.rmtree((tmp_path / "root").read_text())
