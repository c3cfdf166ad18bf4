"""The post-mortems of a run: which there are, and the text of one."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import files

_NAME = re.compile(r"postmortem-[\w.-]+")
_LARGEST = 16 * 1024 * 1024
_MOST_FILES = 200


class Postmortem(NamedTuple):
    """One that an agent has written; its text lies beside it."""

    path: Path
    """Of the text for people."""
    written_ns: int
    sentence: str

    def described(self) -> dict[str, Any]:
        """As the page shows it."""
        return {
            "name": self.path.stem,
            "path": str(self.path),
            "written_ns": self.written_ns,
            "sentence": self.sentence,
        }


def of_run(folders: Sequence[Path], group: str, run: str) -> list[Postmortem]:
    """The latest first; a file that cannot be read is passed over."""
    found = [
        Postmortem(
            path.with_suffix(".txt"),
            written_ns if isinstance(written_ns := report.get("written_ns"), int) else 0,
            str(_mapping(report.get("verdict")).get("sentence") or ""),
        )
        for path, report in _reports(folders)
        if report.get("run") == run and _group(report) in (None, group)
    ]
    return sorted(found, key=lambda each: -each.written_ns)


def text(folders: Sequence[Path], name: str) -> str | None:
    """One post-mortem, as it is written for people; None where there is none of this name."""
    if _NAME.fullmatch(name):
        for folder in folders:
            with contextlib.suppress(OSError):
                return files.read(folder / f"{name}.txt", _LARGEST).decode("utf-8", "replace")
    return None


def _reports(folders: Sequence[Path]) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    for folder in folders:
        paths: list[Path] = []
        with contextlib.suppress(OSError):
            paths = sorted(folder.glob("postmortem-*.json"), key=_newest_first)[:_MOST_FILES]
        for path in paths:
            if report := files.read_mapping(path, _LARGEST):
                yield path, report


def _newest_first(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0  # it has just gone


def _group(report: Mapping[str, Any]) -> Any:
    return _mapping(_mapping(report.get("verdict")).get("who")).get("group")


def _mapping(found: Any) -> Mapping[str, Any]:
    """Any program of this user may have written it."""
    return found if isinstance(found, Mapping) else {}
