"""Writes down a run as it was when it died, failed or stood still: for people and for programs."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from otel_ddp import errors, files
from otel_ddp.history.page.http import json_text

Plain = Mapping[str, Any]

_KEPT = 50
_LONGEST_NAME = 120
_MOST_NUMBERS = 10_000
_STALE_S = 60.0
# People read the files and send them by mail: they stay small, however large the run is.
_MOST_PROCESSES, _MOST_ROWS = 1000, 64


def write(directory: Path, run: str, found: Plain, earlier: Path | None = None) -> Path | None:
    """Write what is *found* of an incident; the file's path, None where that fails.

    *earlier* is what an earlier call for the same incident returned: its file is replaced,
    because more is known now.
    """
    report = {"version": 1, "run": run, "written_ns": time.time_ns(), **found}
    try:
        return _save(directory, run, _by_line(report), earlier)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        errors.warn_once("postmortem", "no post-mortem in %s: %s", directory, why)
        return None


def _by_line(report: Plain) -> str:
    """As JSON, with a line for each process and finding."""
    rows = []
    for name, value in report.items():
        text = json_text(value, ensure_ascii=False)
        if isinstance(value, (list, tuple)):
            most = _MOST_PROCESSES if name == "processes" else _MOST_ROWS
            lines = [f"\n  {json_text(each, ensure_ascii=False)}" for each in value[:most]]
            text = f"[{','.join(lines)}\n ]"
        rows.append(f' "{name}": {text}')
    return "{\n" + ",\n".join(rows) + "\n}\n"


# -- files: the newest ones in one directory, whole, and only this user's


def _save(directory: Path, run: str, content: str, earlier: Path | None) -> Path:
    """Write a new file, or replace *earlier*; its path."""
    files.make_kept(directory)
    path = earlier or _free_name(directory, run)
    try:
        files.replace(path, content)
    except OSError:
        if earlier is None:
            files.remove(path)
        raise
    # Another agent may delete the same ones.
    with contextlib.suppress(FileNotFoundError):
        _delete_oldest(directory)
    return path


def _free_name(directory: Path, run: str) -> Path:
    """The first free name, which is taken from here on: another agent may look for one too."""
    name = re.sub(r"[^\w.-]+", "_", run).encode()[:_LONGEST_NAME].decode(errors="ignore") or "run"
    for number in range(1, _MOST_NUMBERS):
        suffix = "" if number == 1 else f"-{number}"
        path = directory / f"postmortem-{name}{suffix}.json"
        with contextlib.suppress(FileExistsError):
            os.close(files.create(path))
            return path
    raise FileExistsError(17, f"{_MOST_NUMBERS} post-mortems of this name are there already")


def _delete_oldest(directory: Path) -> None:
    """Keep the newest, and no unfinished file of an agent that was killed."""
    ours = directory.glob("postmortem-?*.json")
    for path in sorted(ours, key=lambda each: each.lstat().st_mtime)[:-_KEPT]:
        files.remove(path)
    for path in directory.glob("postmortem-?*.half"):
        if time.time() - path.lstat().st_mtime > _STALE_S:
            files.remove(path)
