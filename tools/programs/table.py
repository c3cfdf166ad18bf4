"""Writes docs/internals/programs.md from what was found of each program."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from tools.programs.judge import Result
from tools.programs.program import Program

PAGE = Path(__file__).parents[2] / "docs" / "internals" / "programs.md"
_FIRST, _LAST = "<!-- found -->", "<!-- end of what was found -->"


def keep(result: Result, folder: Path) -> None:
    """Store a result until the page is written."""
    (folder / "result.json").write_text(json.dumps(asdict(result), indent=1))


def kept(program: Program, root: Path) -> Result | None:
    """The last stored result."""
    path = root / program.name / "result.json"
    return Result(**json.loads(path.read_text())) if path.exists() else None


def write(programs: list[Program], root: Path) -> None:
    """Put the table between its marks."""
    lines = ["| program | ranks×steps, rank 1 late in | not recorded |", "|---|---|---|"]
    for program in programs:
        found = kept(program, root)
        if found is None or found.faults:
            raise SystemExit(f"{program.name} is not there, or has faults: run it first.")
        late = f", {found.late}" if program.late else ""
        size = f"{program.ranks}×{found.steps // program.ranks}"
        lines.append(f"| {program.title} | {size}{late} | {program.lacks} |")
    text = PAGE.read_text()
    before, after = text.split(_FIRST)[0], text.split(_LAST)[1]
    table = "\n".join(lines)
    PAGE.write_text(f"{before}{_FIRST}\n{table}\n{_LAST}{after}")
