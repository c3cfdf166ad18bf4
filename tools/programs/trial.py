"""Starts a program in one way, and reads the records of the witness and of otel_ddp."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.exposition import parse
from tools.programs.workplace import Workplace

from otel_ddp.vocabulary import catalog

BARE, TWO_LINES, RUN = "bare", "two lines", "otel-ddp run"
LATE = "late"
# Timeout of a program. A row takes a minute or two, and ten times as long on a busy machine.
_LIMIT_S = 1200.0
# Timeout for the agent to write the end of a process.
_PATIENCE_S = 60.0
_OVER = ("finished", "failed", "killed")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The results of one start of a program."""

    exit_code: int
    # By rank: the checksum of the weights after each optimizer step.
    weights: dict[int, list[str]]
    step_s: float | None
    printed: list[str]
    # Of otel_ddp: its report, its last counts by rank, and what it said.
    reports: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[int, int] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)


def start(workplace: Workplace, way: str) -> Seen:
    """Run the program to its end in a new folder."""
    folder = workplace.folder(way.replace(" ", "-"))
    with tempfile.TemporaryDirectory(prefix="otel_ddp-programs-") as kept:
        try:
            return _seen(workplace, way, folder, Path(kept))
        finally:
            _end_leftovers(kept)


def _seen(workplace: Workplace, way: str, folder: Path, kept: Path) -> Seen:
    program = workplace.program
    witness = kept / "witness"
    witness.mkdir()
    env = {**workplace.env(), **_places(kept), "STEP_WITNESS": str(witness)}
    command = ["bash", "-c", program.command]
    if way in (RUN, LATE):
        command = ["otel-ddp", "run", "--", *command]
    if way == LATE:
        env["STEP_WITNESS_LATE"] = f"{program.late}:{program.late_s}"
        # It ends within seconds, before enough of its steps are measured otherwise.
        env["OTEL_DDP_OVERHEAD"] = "all"
    edits = program.two_lines if way == TWO_LINES else []
    with workplace.edited(folder, edits), (folder / "output.txt").open("w") as output:
        exit_code = _ended(command, folder / program.folder, env, output)
    weights, gaps = _witnessed(witness)
    text = (folder / "output.txt").read_text(errors="replace")
    recorded = _recorded(workplace, env) if way != BARE else {}
    lines = text.splitlines()
    said = [each for each in lines if "otel_ddp" in each]
    theirs = "\n".join(each for each in lines if each not in said)
    return Seen(
        exit_code=exit_code,
        weights=weights,
        step_s=statistics.median(gaps) if gaps else None,
        printed=re.findall(program.printed, theirs) if program.printed else [],
        said=said,
        **recorded,
    )


def _places(kept: Path) -> dict[str, str]:
    return {
        "OTEL_DDP_DIR": str(kept / "place"),
        "OTEL_DDP_SPOOL_DIR": str(kept / "spool"),
        "OTEL_DDP_HISTORY_DIR": str(kept / "history"),
        "OTEL_EXPORTER_PROMETHEUS_PORT": "0",
        "OTEL_METRICS_EXPORTER": "none",
        "OTEL_TRACES_EXPORTER": "none",
        "OTEL_LOGS_EXPORTER": "none",
    }


def _ended(command: list[str], folder: Path, env: dict[str, str], output: Any) -> int:
    started = subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=output)
    try:
        return started.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        started.kill()
        return started.wait()


def _end_leftovers(mark: str) -> None:
    """Kill workers that a terminated launcher has left, by this mark in their environment."""
    for each in Path("/proc").iterdir():
        if each.name.isdigit() and int(each.name) != os.getpid():
            with suppress(OSError):
                if mark.encode() in (each / "environ").read_bytes():
                    os.kill(int(each.name), signal.SIGKILL)


def _witnessed(folder: Path) -> tuple[dict[int, list[str]], list[float]]:
    weights: dict[int, list[str]] = {}
    gaps: list[float] = []
    for path in sorted(folder.iterdir()):
        lines = [each.split() for each in path.read_text().splitlines()]
        weights.setdefault(int(path.name.split("-")[0]), []).extend(
            f"{number}:{checksum}" for number, checksum, _ in lines
        )
        # Without the first, which includes the start.
        gaps += [float(each[2]) for each in lines[1:]]
    return weights, gaps


def _recorded(workplace: Workplace, env: dict[str, str]) -> dict[str, Any]:
    """Scrape the agent's last counts, end it, and read the reports of its histories."""
    agents = []
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        status = _asked(workplace, env, "status") or {}
        agents = [each for each in status.get("agents", []) if each["alive"]]
        if not agents or all(each["state"] in _OVER for each in status["processes"]):
            break
        time.sleep(0.5)
    counts: dict[str, dict[int, int]] = {"steps": {}, "samples": {}}
    for agent in agents:
        with urllib.request.urlopen(agent["scrape"], timeout=30) as response:
            _add_counts(response.read().decode(), counts)
        _end(agent["pid_here"], deadline)
    runs = _asked(workplace, env, "runs") or {"runs": []}
    names = [f"{each['group']}/{each['run']}".lstrip("/") for each in runs["runs"]]
    reports = [_asked(workplace, env, "report", each) for each in names]
    return {"reports": [each for each in reports if each], **counts}


def _add_counts(text: str, counts: dict[str, dict[int, int]]) -> None:
    wanted = {
        catalog.TRAINING_STEPS.prometheus: "steps",
        catalog.TRAINING_SAMPLES.prometheus: "samples",
    }
    for name, labels, value in parse(text):
        if name in wanted and labels.get("rank", "").isdigit():
            of_ranks = counts[wanted[name]]
            rank = int(labels["rank"])
            of_ranks[rank] = of_ranks.get(rank, 0) + int(value)


def _end(pid: int, deadline: float) -> None:
    os.kill(pid, signal.SIGTERM)
    while time.monotonic() < deadline and Path(f"/proc/{pid}").exists():
        time.sleep(0.05)


def _asked(workplace: Workplace, env: dict[str, str], *words: str) -> dict[str, Any] | None:
    command = [str(workplace.bin / "otel-ddp"), words[0], *words[1:], "--json"]
    answer = subprocess.run(command, env=env, capture_output=True, text=True)
    if answer.returncode:
        print(f"{' '.join(words)}: {answer.stderr.strip()}", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(answer.stdout)
    return found
