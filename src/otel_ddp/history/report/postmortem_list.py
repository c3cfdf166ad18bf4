"""Finds the post-mortems of a run: their files, and what each is about."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MOST, _LARGEST = 200, 16 * 1024 * 1024


def of_run(folder: Path, group: str, run: str) -> list[dict[str, Any]]:
    """The newest first; a file that cannot be read is passed over."""
    found = [
        {"path": str(path.with_suffix(".txt")), "sentence": _sentence(content)}
        for path, content in _contents(folder)
        if content.get("run") == run and content.get("group") in (None, group)
    ]
    return found[:5]


def _contents(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    try:
        paths = sorted(folder.glob("postmortem-*.json"), key=lambda path: -path.stat().st_mtime)
    except OSError:
        return
    for path in paths[:_MOST]:
        content = _read(path)
        if isinstance(content, dict):
            yield path, content


def _read(path: Path) -> Any:
    try:
        with path.open("rb") as file:
            return json.loads(file.read(_LARGEST))
    except (OSError, ValueError, RecursionError):
        return None


def _sentence(content: dict[str, Any]) -> str:
    verdict = content.get("verdict")
    return str(verdict.get("sentence") or "") if isinstance(verdict, dict) else ""
