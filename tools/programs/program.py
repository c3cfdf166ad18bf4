"""A program of others, as its file in listed/ describes it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import tomllib

LISTED = Path(__file__).with_name("listed")


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Lines to insert into a file after an existing line."""

    # Below the program's folder, or `site-packages/...`.
    file: str
    after: str
    add: str


@dataclass(frozen=True, kw_only=True)
class Program:
    """What to install, write and start, and the expected result."""

    name: str
    title: str
    # Who wrote what is started: the repository, the package, or this list for a library.
    author: str
    packages: list[str]
    command: str
    # What was reduced, or written by us.
    changed: str
    two_lines: list[Edit]
    python: str = "3.11"
    repository: str = ""
    commit: str = ""
    # The folder of the repository that the command is started in.
    folder: str = "."
    files: dict[str, str] = field(default_factory=dict)
    # Writes the data; it runs once, where the command does.
    prepare: str = ""
    env: dict[str, str] = field(default_factory=dict)
    ranks: int = 2
    # Optimizer steps in a step of the program; 0 if they do not correspond.
    optimizer_steps: int = 1
    # Of one rank, over the whole run.
    samples: int | None = None
    # Names of values, as `name` or `split/name`, and of settings that have to be there.
    values: list[str] = field(default_factory=list)
    config: list[str] = field(default_factory=list)
    # Finds the losses that the program prints.
    printed: str = ""
    # The largest relative difference of a recorded to a printed loss; 0: not compared.
    loss_within: float = 0.0
    # What rank 1 is made late in: input, forward or optimizer.
    late: str = ""
    # Its delay in seconds a step, and the expected phase of the verdict.
    late_s: float = 0.1
    late_phase: str = ""
    # What is not shown, and why.
    lacks: str = ""


def read(path: Path) -> Program:
    """Unknown and missing keys are errors."""
    told: dict[str, Any] = tomllib.loads(path.read_text())
    unknown = set(told) - {each.name for each in fields(Program)}
    if unknown:
        raise SystemExit(f"{path.name}: no such key: {', '.join(sorted(unknown))}.")
    edits = [Edit(**each) for each in told.pop("two_lines")]
    return Program(name=path.stem, two_lines=edits, **told)


def listed() -> list[Program]:
    """All of them, by name."""
    return [read(each) for each in sorted(LISTED.glob("*.toml"))]
