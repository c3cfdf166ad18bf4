"""The post-mortems of a run: which there are, and the text of one."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from otel_ddp.history.page.exchange import Refused
from otel_ddp.history.page.runs import mapping, whole

_NAME = re.compile(r"postmortem-[\w.-]+")
_LARGEST = 4 * 1024 * 1024
_MOST_FILES = 200


def of_run(folders: Sequence[Path], group: str, run: str) -> list[dict[str, Any]]:
    """The latest first."""
    found = [
        {
            "name": path.stem,
            "written_ns": whole(report.get("written_ns")),
            "sentence": str(mapping(report.get("verdict")).get("sentence") or ""),
        }
        for path, report in _reports(folders)
        if report.get("run") == run and _group(report) in (None, group)
    ]
    return sorted(found, key=lambda each: -each["written_ns"])


def text(folders: Sequence[Path], name: str) -> str:
    """One post-mortem, as it is written for people."""
    if _NAME.fullmatch(name):
        for folder in folders:
            with contextlib.suppress(OSError), open(folder / f"{name}.txt", "rb") as file:
                return file.read(_LARGEST).decode("utf-8", "replace")
    raise Refused(404, f"there is no post-mortem {name[:200]!r}")


def _reports(folders: Sequence[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    for folder in folders:
        paths: list[Path] = []
        with contextlib.suppress(OSError):
            paths = sorted(folder.glob("postmortem-*.json"))[:_MOST_FILES]
        for path in paths:
            with contextlib.suppress(OSError, ValueError, RecursionError):
                with open(path, "rb") as file:
                    report = json.loads(file.read(_LARGEST))
                if isinstance(report, dict):
                    yield path, report


def _group(report: dict[str, Any]) -> Any:
    return mapping(mapping(report.get("verdict")).get("who")).get("group")
