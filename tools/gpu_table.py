"""Runs all tests of a device, and writes tables of their results for docs/gpu.md.

    python tools/gpu_table.py [FILE]

The device is torch's accelerator, else the fake one of the tests. Tests report figures by
`record_property`, or print them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "build" / "gpu.md"
_LONGEST = 400


def present() -> str:
    """The type of torch's accelerator; empty without one."""
    import torch

    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None else ""


def environment(device: str) -> Iterator[tuple[str, str]]:
    """The environment of the figures."""
    import torch

    yield "date", time.strftime("%Y-%m-%d")
    built = ("cuda", "hip", "xpu")
    versions = [f"{each} {found}" for each in built if (found := getattr(torch.version, each, ""))]
    yield "torch", ", ".join([torch.__version__, *versions])
    if not device:
        yield "device", "that of the tests: what needs a real one is skipped"
        return
    module = torch.get_device_module(device)
    names = [module.get_device_name(i) for i in range(module.device_count())]
    yield "device", ", ".join(names)
    if device == "cuda":
        yield "collectives", ".".join(map(str, torch.cuda.nccl.version()))
        query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        with contextlib.suppress(FileNotFoundError):
            asked = subprocess.run(query, capture_output=True, text=True, check=False)
            yield "driver", asked.stdout.strip().partition("\n")[0]


class Outcome(NamedTuple):
    """One test."""

    name: str
    ended: str
    said: str
    expected: str
    """The expected verdict, if any."""


def outcomes(report: Path) -> Iterator[Outcome]:
    """The outcome of each test, with its figures."""
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        told = {each.get("name"): each.get("value") or "" for each in case.iter("property")}
        expected, seen = told.pop("expected", ""), told.pop("seen", "")
        said = [seen, *(f"{each}: {value}" for each, value in told.items())]
        for each in case.iter("system-err"):
            printed = (each.text or "").splitlines()
            said += [line for line in printed if line.strip("- ") and "Captured Err" not in line]
        outcome = "passed"
        for kind in ("skipped", "failure", "error"):
            for each in case.iter(kind):
                outcome = {"skipped": "skipped"}.get(kind, "failed")
                said.append(each.get("message") or "")
        yield Outcome(name, outcome, "; ".join(filter(None, said)), expected)


def row(*cells: str) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(cell, cells))} |"


def cell(text: str) -> str:
    """The text as one cell: one line, without `|`."""
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} [...]"


def main() -> int:
    if importlib.util.find_spec("torch") is None:
        sys.exit("There is no torch here: these tests take the one of the machine and its device.")
    table = Path(sys.argv[1]) if len(sys.argv) > 1 else TABLE
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        device = present()
        command = (sys.executable, "-m", "pytest", "-m", "gpu", "-rs", f"--junitxml={report}")
        # Only the older format of the report has properties.
        options = ("-o", "junit_logging=system-err", "-o", "junit_family=xunit1")
        env = {**os.environ, "TEST_DEVICE": device}
        code = subprocess.run([*command, *options], cwd=ROOT, env=env, check=False).returncode
        lines = [f"{name}: {value}" for name, value in environment(device)]
        found = [*outcomes(report)]
    lines += ["", "| case | must be said | outcome | seen |", "|---|---|---|---|"]
    lines += [
        row(each.name, each.expected, each.ended, each.said) for each in found if each.expected
    ]
    lines += ["", "| test | outcome | seen |", "|---|---|---|"]
    lines += [row(each.name, each.ended, each.said) for each in found if not each.expected]
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text("\n".join(lines) + "\n")
    sys.stdout.write(f"Written: {table}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
