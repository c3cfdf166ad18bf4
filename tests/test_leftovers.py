"""What a test starts ends with it: also where its set-up fails or hangs, or tests are killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import leftovers
from node import until

# A parent with a child in a session of its own, as torchrun has them; neither ends by itself.
PROGRAM = """
import subprocess, sys
child = [sys.executable, "-c", "import time; time.sleep(600)"]
subprocess.Popen(child, start_new_session=True)
print("there", flush=True)
sys.stdin.read()
"""

FILE = """
import os, sys, time
from pathlib import Path
import pytest
from node import Node

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def launch():
    with Node() as node:
        process = node.start(sys.executable, str(HERE / "program.py"))
        assert process.stdout.readline() == "there\\n"
        (HERE / "mark").write_text(os.environ["STARTED_BY_TESTS"])
        {then}
        yield


def test_that_needs_it(launch):
    pass
"""


def pytest_whose_set_up(then: str, folder: Path) -> subprocess.Popen[str]:
    """pytest with one test, whose set-up starts the program and goes on like this."""
    (folder / "program.py").write_text(PROGRAM)
    (folder / "test_it.py").write_text(FILE.replace("{then}", then))
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


def left(folder: Path) -> dict[int, str]:
    return leftovers.living(leftovers.TESTS, (folder / "mark").read_text())


@pytest.mark.parametrize("then", ["raise RuntimeError", "time.sleep(600)"])
def test_a_set_up_that_fails_leaves_nothing_behind(then: str, tmp_path: Path) -> None:
    with pytest_whose_set_up(then, tmp_path) as tests:
        output, _ = tests.communicate()

    assert "1 error" in output
    assert "processes behind" not in output
    assert left(tmp_path) == {}


def test_tests_that_are_killed_leave_nothing_behind(tmp_path: Path) -> None:
    with pytest_whose_set_up("time.sleep(600)", tmp_path) as tests:
        until((tmp_path / "mark").exists, "the program")
        until(lambda: len(left(tmp_path)) == 2, "the program and its child")
        tests.kill()

    until(lambda: left(tmp_path) == {}, "the end of both")
