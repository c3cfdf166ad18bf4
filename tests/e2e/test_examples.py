"""The examples run as their first lines say, and what they log is there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from node import Node, finished, until

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))

# Program: how it is started, how many ranks it records, and a value that it logs.
EXPECTED = {
    "quickstart.py": ([], 1, "accuracy"),
    "ddp.py": (["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], 2, "loss"),
    "spawn.py": ([], 1, "total"),
}


def test_every_example_is_run_here() -> None:
    assert sorted(EXPECTED) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs_and_is_recorded(name: str) -> None:
    launcher, ranks, value = EXPECTED[name]
    with Node() as node:
        finished(node.start(sys.executable, *launcher, str(ROOT / "examples" / name)))

        until(lambda: len(node.series("training_scalar", name=value)) == ranks, "its values")
        assert all(each["state"] == "finished" for each in node.processes())
        assert len({each["run"] for each in node.processes()}) == 1


def test_the_snippets_of_the_readme_run_as_they_stand() -> None:
    text = (ROOT / "README.md").read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)

    assert snippets
    for snippet in snippets:
        with Node() as node:
            node.run(snippet)
