"""What lies beside the histories of a run: the post-mortems of its agents, and its profiles.

Any program of this user may have written the files: a value may be of any type.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_ddp import files, plain

PROFILE = "profile.json"
_POSTMORTEM_NAME = re.compile(r"postmortem-[\w.-]+")
_LARGEST_POSTMORTEM, _LARGEST_PROFILE = 16 * 1024 * 1024, 1024 * 1024
_MOST_POSTMORTEMS = 200
_TRACE = re.compile(r"rank-[0-9]+\.json\.gz")
_LONGEST_NAME = 80


# -- post-mortems


def postmortems(folders: Sequence[Path], group: str, run: str) -> list[dict[str, Any]]:
    """The latest first; a file that cannot be read is passed over."""
    found = []
    for path, report in _reports(folders):
        verdict = plain.mapping(report.get("verdict"))
        its_group = plain.mapping(verdict.get("who")).get("group")
        if report.get("run") == run and its_group in (None, group):
            found.append(
                {
                    "name": path.stem,
                    "path": str(path),
                    "written_ns": plain.whole(report.get("written_ns")) or 0,
                    "sentence": str(verdict.get("sentence") or ""),
                }
            )
    return sorted(found, key=lambda each: -each["written_ns"])


def postmortem(folders: Sequence[Path], name: str) -> str | None:
    """One, as it is written; None where there is none of this name."""
    for folder in folders if _POSTMORTEM_NAME.fullmatch(name) else ():
        with contextlib.suppress(OSError):
            text = files.read(folder / f"{name}.json", _LARGEST_POSTMORTEM)
            return text.decode("utf-8", "replace")
    return None


def _reports(folders: Sequence[Path]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for folder in folders:
        paths: list[Path] = []
        with contextlib.suppress(OSError):
            paths = sorted(folder.glob("postmortem-*.json"), key=_newest_first)
        for path in paths[:_MOST_POSTMORTEMS]:
            if report := files.read_mapping(path, _LARGEST_POSTMORTEM):
                yield path, report


def _newest_first(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0  # it has just gone


# -- profiles


def profile_directory() -> Path:
    """On a disk, as post-mortems are: a trace is much larger than a journal."""
    return files.default_root() / "profiles"


def profile_name(run: str, asked: str) -> str:
    """The name of a folder: its run, and when it was asked for."""
    safe = re.sub(r"[^\w.-]+", "-", run).strip(".-")[:_LONGEST_NAME]
    return f"{safe or 'run'}-{asked}"


def profiles(group: str, run: str, root: Path | None = None) -> list[dict[str, Any]]:
    """Of a run on this node, the newest first; `ranks`: with a trace, the suspect first."""
    root = root or profile_directory()
    try:
        names = sorted(os.listdir(root)) if files.is_kept(root) else []
    except OSError:
        return []
    found = []
    for name in names:
        # Empty: a window is under way, or it is no folder of ours.
        content = files.read_mapping(root / name / PROFILE, _LARGEST_PROFILE)
        if {"group": group, "run": run}.items() <= content.items():
            found.append(_profile(root / name, content))
    return sorted(found, key=lambda each: -each["asked_ns"])


def _profile(folder: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    rows = [row for row in plain.list_of(dict, content.get("ranks")) if row.get("file")]
    ranks = [rank for row in rows if (rank := plain.whole(row.get("rank"))) is not None]
    traces = plain.list_of(str, content.get("files"))
    return {
        "asked_ns": plain.whole(content.get("asked_ns")) or 0,
        "why": str(content.get("why") or ""),
        "ranks": ranks,
        "traces": [str(folder / each) for each in traces if _TRACE.fullmatch(each)],
    }
