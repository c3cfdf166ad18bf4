"""python -m tools.programs [NAME ...]: runs programs of others bare, with two lines, and unchanged.

Each is installed into an environment of its own and started three times: bare, with two lines of
ours, and below `otel-ddp run`; a fourth time with a late rank where its file asks for that.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from tools.programs import table
from tools.programs.judge import judged
from tools.programs.program import Program, listed
from tools.programs.trial import BARE, LATE, RUN, TWO_LINES, start
from tools.programs.workplace import ROOT, Workplace


def main() -> int:
    """The number of programs with a fault, at most 1."""
    parser = argparse.ArgumentParser(prog="python -m tools.programs", description=__doc__)
    parser.add_argument("names", nargs="*", help="files of listed/; without one, all")
    parser.add_argument("--at", type=Path, default=ROOT / "build" / "programs", help="the folder")
    parser.add_argument("--write", action="store_true", help="write the page, run nothing")
    options = parser.parse_args()
    programs = [each for each in listed() if not options.names or each.name in options.names]
    if options.write:
        table.write(programs, options.at)
        return 0
    # Let SIGTERM end the running program too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    failed = [each.name for each in programs if not _passes(each, options.at.resolve())]
    print(f"{len(programs) - len(failed)} of {len(programs)} are as they have to be.")
    return 1 if failed else 0


def _passes(program: Program, root: Path) -> bool:
    workplace = Workplace(program, root)
    workplace.root.mkdir(parents=True, exist_ok=True)
    workplace.make()
    seen = {BARE: start(workplace, BARE)}
    if seen[BARE].exit_code:
        print(f"{program.name}: bare, it ended with {seen[BARE].exit_code}: {workplace.root}/bare")
        return False
    for way in (TWO_LINES, RUN, *([LATE] if program.late else [])):
        seen[way] = start(workplace, way)
    result = judged(program, seen)
    table.keep(result, workplace.root)
    cost = ", ".join(f"{way} x{ratio:.2f}" for way, ratio in result.cost.items())
    print(f"{program.name}: {result.steps} steps, {len(result.values)} values; step time {cost}")
    for each in result.faults:
        print(f"  {each}")
    return not result.faults


if __name__ == "__main__":
    raise SystemExit(main())
