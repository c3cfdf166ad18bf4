"""python -m tools.dashboards [--check]: writes Grafana's dashboards, or prints how they differ."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

from tools.dashboards import compare, fleet, goodput, gpus, pipeline, ranks, run, runs

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"
BOARDS = {
    "compare": compare.build,
    "fleet": fleet.build,
    "goodput": goodput.build,
    "gpus": gpus.build,
    "pipeline": pipeline.build,
    "ranks": ranks.build,
    "run": run.build,
    "runs": runs.build,
}


def differences(folder: Path = FOLDER) -> list[str]:
    """What the files lack of what would be written, line by line."""
    made = {f"{name}.json": build() for name, build in BOARDS.items()}
    changed: list[str] = []
    for name in sorted({*made, *(path.name for path in folder.glob("*.json"))}):
        path = folder / name
        there = path.read_text(encoding="utf-8") if path.exists() else ""
        changed += difflib.unified_diff(
            there.splitlines(),
            made.get(name, "").splitlines(),
            name,
            f"{name}, generated",
            lineterm="",
        )
    return changed


def main(words: list[str]) -> int:
    if words == ["--check"]:
        changed = differences()
        for line in changed:
            print(line)
        return 1 if changed else 0
    if words:
        print(__doc__, file=sys.stderr)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, build in BOARDS.items():
        (FOLDER / f"{name}.json").write_text(build(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
