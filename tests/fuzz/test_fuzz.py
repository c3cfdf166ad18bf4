"""What fuzzing has found once stays mended; and a short search for more."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz.targets import TARGETS

CORPUS = Path(__file__).with_name("corpus")
GUIDED = Path(__file__).with_name("guided.py")
SECONDS = 30


@pytest.mark.parametrize("target", TARGETS)
def test_each_input_of_the_corpus_is_survived(target: str) -> None:
    inputs = sorted((CORPUS / target).iterdir())

    assert inputs
    for each in inputs:
        TARGETS[target](each.read_bytes())


@pytest.mark.stress
@pytest.mark.parametrize("target", TARGETS)
def test_a_short_search_finds_nothing(target: str, tmp_path: Path) -> None:
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("needs the extra `fuzz`")
    shutil.copytree(CORPUS / target, tmp_path / "corpus")

    found = subprocess.run(
        [sys.executable, GUIDED, target, str(SECONDS), tmp_path / "corpus"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{GUIDED.parents[1]}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=20 * SECONDS,
    )

    assert found.returncode == 0, found.stderr[-4000:]
