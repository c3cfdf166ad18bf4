"""The post-mortems that agents write beside the histories of a run.

Any program of this user may have written the files: a value may be of any type.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_ddp import files, plain

_POSTMORTEM_NAME = re.compile(r"postmortem-[\w.-]+")
_LARGEST_POSTMORTEM = 16 * 1024 * 1024
_MOST_POSTMORTEMS = 200


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
