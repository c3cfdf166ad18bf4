"""Writes down a run as it was when it died, failed or stood still: for people and for programs."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_ddp import errors, files
from otel_ddp.diagnosis.say import about
from otel_ddp.history.page.exchange import json_text
from otel_ddp.history.terminal import aligned, printable
from otel_ddp.journal.process_state import ProcessState

Plain = Mapping[str, Any]

_KEPT = 50
_LONGEST_NAME = 120
_MOST_NUMBERS = 10_000
_STALE_S = 60.0
# People read the files and send them by mail: they stay small, however large the run is.
_MOST_PROCESSES = 1000
_MOST_ROWS = 64
_LONGEST_CELL = 60


def write(
    directory: Path,
    run: str,
    *,
    verdict: Plain,
    processes: Sequence[ProcessState],
    open_verdicts: Sequence[Plain] = (),
    gpus: Sequence[Plain] = (),
    now_ns: int,
    earlier: Path | None = None,
) -> Path | None:
    """Write the two files of an incident; the path of the `.json`, None where that fails.

    *earlier* is what an earlier call for the same incident returned: its files are replaced,
    because more is known now. A verdict is a mapping with `kind`, `who` (labels), `sentence`,
    `phase`, `step`, `since_ns` and `evidence`.
    """
    report = {
        "version": 1,
        "run": run,
        "written_ns": now_ns,
        "verdict": verdict,
        "processes": [each.to_json() for each in processes[:_MOST_PROCESSES]],
        "open_verdicts": open_verdicts[:_MOST_ROWS],
        "gpus": gpus,
    }
    try:
        content = json_text(report, indent=1, ensure_ascii=False)
        return _save(directory, run, content, _text(report, processes), earlier)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        errors.warn_once("postmortem", "no post-mortem in %s: %s", directory, why)
        return None


# -- files: the newest ones in one directory, whole, and only this user's


def _save(directory: Path, run: str, content: str, text: str, earlier: Path | None) -> Path:
    """Write a `.json` and a `.txt`, or replace those of *earlier*; the path of the `.json`."""
    files.make_kept(directory)
    path = earlier or _free_name(directory, run)
    try:
        files.replace(path, content)
    except OSError:
        if earlier is None:
            files.remove(path.with_suffix(".txt"))
        raise
    files.replace(path.with_suffix(".txt"), text)
    # Another agent may delete the same ones.
    with contextlib.suppress(FileNotFoundError):
        _delete_oldest(directory)
    return path


def _free_name(directory: Path, run: str) -> Path:
    """The first free name. Another agent may look for one too: its `.txt` is made at once."""
    name = re.sub(r"[^\w.-]+", "_", run).encode()[:_LONGEST_NAME].decode(errors="ignore") or "run"
    for number in range(1, _MOST_NUMBERS):
        suffix = "" if number == 1 else f"-{number}"
        path = directory / f"postmortem-{name}{suffix}.json"
        if not os.path.lexists(path):
            with contextlib.suppress(FileExistsError):
                os.close(files.create(path.with_suffix(".txt")))
                return path
    raise FileExistsError(17, f"{_MOST_NUMBERS} post-mortems of this name are there already")


def _delete_oldest(directory: Path) -> None:
    """Keep the newest, and no unfinished file of an agent that was killed."""
    written_at = {each: each.lstat().st_mtime for each in directory.glob("postmortem-?*.*")}
    ours = sorted(
        (each for each in written_at if each.suffix == ".json"), key=lambda each: written_at[each]
    )
    for path in ours[:-_KEPT]:
        files.remove(path, path.with_suffix(".txt"))
    for path, at in written_at.items():
        if path.suffix == ".half" and time.time() - at > _STALE_S:
            files.remove(path)


# -- the text: where every rank was, and why it ended

_HEADS = ("rank", "node", "state", "step", "phase", "for", "last seen")


def _text(report: Plain, processes: Sequence[ProcessState]) -> str:
    now_ns, verdict = report["written_ns"], report["verdict"]
    processes = sorted(
        processes, key=lambda each: (each.node, each.rank is None, each.rank or 0, each.started_ns)
    )
    world = max((each.world_size or 0 for each in processes), default=0)
    began = time.gmtime((verdict.get("since_ns") or now_ns) / 1e9)
    rows = [_row(each, now_ns) for each in processes[:_MOST_ROWS]]
    sections = {
        "Where every rank was": [*aligned([_HEADS, *rows])] if rows else [],
        "What they reported": [
            f"{_name(each)}: {each.reason}" for each in processes if each.reason
        ],
        "Also open at that moment": [str(each["sentence"]) for each in report["open_verdicts"]],
    }
    lines = [
        str(verdict.get("sentence") or "an incident"),
        "",
        f"run {report['run']}, {time.strftime('%Y-%m-%d %H:%M:%S UTC', began)}, "
        f"as one agent knew it: {len(processes)} of {world or '?'} processes",
    ]
    if len(processes) > len(rows):
        sections["Where every rank was"].append(f"and {len(processes) - len(rows)} more")
    for head, found in sections.items():
        if found:
            lines += ["", head, *(f"  {row}" for row in found[: _MOST_ROWS + 2])]
    return "\n".join(printable(line) for line in lines) + "\n"


def _row(each: ProcessState, now_ns: int) -> list[str]:
    seen_ns = each.seen_alive_ns if each.ended else now_ns
    spent = about(max(0, seen_ns - each.phase_since_ns) / 1e9) if seen_ns else ""
    seen = "now"
    if each.ended:
        seen = f"{about(max(0, now_ns - seen_ns) / 1e9)} ago" if seen_ns else "?"
    rank = f"p{each.pid}" if each.rank is None else str(each.rank)
    step = "" if each.step is None else str(each.step)
    cells = rank, each.node, each.state, step, each.phase, spent, seen
    return [cell[:_LONGEST_CELL] for cell in cells]


def _name(each: ProcessState) -> str:
    return f"process {each.pid}" if each.rank is None else f"rank {each.rank}"
