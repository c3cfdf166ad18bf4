"""Runs all tests that need a GPU, and writes down what they saw: a table for docs/gpu.md.

    python tools/gpu_table.py [FILE]

Tests say their figures by `record_property`, or print them.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "build" / "gpu.md"
_LONGEST = 400


def environment() -> Iterator[tuple[str, str]]:
    """What the figures depend on."""
    import torch

    yield "date", time.strftime("%Y-%m-%d")
    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        yield "GPU", "none: what is below proves nothing"
        return
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield "GPU", ", ".join(names)
    yield "NCCL", ".".join(map(str, torch.cuda.nccl.version()))
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    asked = subprocess.run(query, capture_output=True, text=True, check=False)
    yield "driver", asked.stdout.strip().partition("\n")[0]


def outcomes(report: Path) -> Iterator[tuple[str, str, str]]:
    """Each test, how it ended, and what it said."""
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        said = [f"{each.get('name')}: {each.get('value')}" for each in case.iter("property")]
        for each in case.iter("system-err"):
            printed = (each.text or "").splitlines()
            said += [line for line in printed if line.strip("- ") and "Captured Err" not in line]
        outcome = "passed"
        for kind in ("skipped", "failure", "error"):
            for each in case.iter(kind):
                outcome = {"skipped": "skipped"}.get(kind, "failed")
                said.append(each.get("message") or "")
        yield name, outcome, "; ".join(filter(None, said))


def cell(text: str) -> str:
    """One line that no table breaks at."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} [...]"


def main() -> int:
    table = Path(sys.argv[1]) if len(sys.argv) > 1 else TABLE
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = (sys.executable, "-m", "pytest", "-m", "gpu", "-rs", f"--junitxml={report}")
        # Of the kinds of this report only the older one has properties.
        options = ("-o", "junit_logging=system-err", "-o", "junit_family=xunit1")
        code = subprocess.run([*command, *options], cwd=ROOT, check=False).returncode
        rows = [*environment()]
        lines = [f"{name}: {value}" for name, value in rows]
        lines += ["", "| test | outcome | seen |", "|---|---|---|"]
        lines += [f"| {' | '.join(map(cell, each))} |" for each in outcomes(report)]
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text("\n".join(lines) + "\n")
    sys.stdout.write(f"Written: {table}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
