"""Runs the programs of docs/frameworks.md, and reads what their ranks have recorded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import warm
from conftest import Here, Journal
from extras import needed
from node import Node, finished

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"
# What users import of each takes seconds.
_MODULES = ("transformers.trainer", "lightning.pytorch", "accelerate")


def snippet(heading: str) -> str:
    """The program under this heading of the page."""
    _, _, text = PAGE.read_text().partition(f"\n## {heading}\n")
    found = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert found, heading
    return found[1]


class Value(NamedTuple):
    """What a rank logged at once, with its step and epoch."""

    step: int | None
    epoch: float | None
    values: dict[str, float]


class Ran(NamedTuple):
    """A program that has ended."""

    printed: str
    report: Any
    """What it wrote to report.json."""
    ranks: list[Journal]

    def logged(self, rank: int, split: str = "train") -> list[Value]:
        """The calls of `log` that name an epoch: of the framework, and not of our own readings."""
        journal = self.ranks[rank]
        found = []
        for call in journal.calls:
            named = [
                (journal.names[number], value)
                for number, value in zip(call.names, call.values, strict=True)
            ]
            values = {name.text: value for name, value in named if name.split == split}
            if values and call.epoch is not None:
                found.append(Value(call.step, call.epoch, values))
        return found


class Frameworks:
    """Starts programs in which the frameworks are imported already."""

    def __init__(self, python: warm.Python, folder: Path) -> None:
        self._python = python
        self._folder = folder

    def run(self, source: str, ranks: int = 2, fails: bool = False) -> Ran:
        """Run a program under torchrun, or without it if it has one rank."""
        folder = self._folder / f"run-{len(list(self._folder.iterdir()))}"
        folder.mkdir()
        program = folder / "train.py"
        program.write_text(source)
        launcher: Sequence[str] = ()
        if ranks > 1:
            launcher = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)
        env = {
            **self._python.env,
            **dict.fromkeys(("HOME", "TMPDIR"), str(folder)),
            "ACCELERATE_USE_CPU": "true",
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "HF_HUB_OFFLINE": "1",
            "OTEL_DDP_AGENT": "off",
            "WANDB_MODE": "disabled",
        }
        with Node(**env) as node:
            process = node.start(
                "/usr/bin/env", "-C", str(folder), self._python.executable, *launcher, str(program)
            )
            if fails:
                printed = process.communicate()[0]
                assert process.returncode
            else:
                printed = finished(process)
            journals = Here(node.place.directory).read()
        report = folder / "report.json"
        return Ran(
            printed,
            json.loads(report.read_text()) if report.exists() else None,
            sorted(journals, key=lambda each: each.identity["global_rank"]),
        )


@contextmanager
def imported(folder: Path) -> Iterator[Frameworks]:
    """Imports the frameworks, and runs programs in subfolders of this folder."""
    for module in _MODULES:
        needed(module.partition(".")[0], "frameworks")
    with warm.with_imported(*_MODULES, "torch.distributed.run") as python:
        yield Frameworks(python, folder)
