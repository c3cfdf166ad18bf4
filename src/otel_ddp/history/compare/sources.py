"""Reads a side of a comparison from a history or from a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from otel_ddp import files
from otel_ddp.history.compare import side
from otel_ddp.history.compare.side import Side
from otel_ddp.history.find_run import NotFound, find_run
from otel_ddp.history.report_file import FORMAT, VERSION

_LARGEST_REPORT = 256 * 1024 * 1024


def load_all(words: str, folder: Path, *, ours: bool = False) -> list[Side]:
    """One run, or several with commas between them."""
    if "," in words and not Path(words).expanduser().exists():
        named = [each.strip() for each in words.split(",") if each.strip()]
        if not named:
            raise NotFound(f"{words!r} names no run: give one, or several with commas between.")
        return [load(each, folder, ours=ours) for each in named]
    return [load(words, folder, ours=ours)]


def load(words: str, folder: Path, *, ours: bool = False) -> Side:
    """What *words* mean; *ours* as in find_run. Raises NotFound or reader.Unreadable."""
    path = Path(words).expanduser()
    if path.is_dir() and (path / "report.json").is_file() and not any(path.glob("*.sqlite")):
        path /= "report.json"
    if path.suffix == ".json" and path.is_file():
        return _of_report(path)
    with find_run(words, folder, ours=ours) as run:
        return side.of_run(run)


def _refuse(constant: str) -> None:
    # Reports have null there; an infinite number of steps has no mean.
    raise ValueError(f"{constant} is no number of a report")


def _of_report(path: Path) -> Side:
    try:
        if path.stat().st_size > _LARGEST_REPORT:
            raise NotFound(f"{path} is too large for a report.")
        content: Any = files.parse_json(path.read_bytes(), parse_constant=_refuse)
    except (OSError, ValueError) as error:
        raise NotFound(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise NotFound(f"{path} is no report of `otel-ddp report`.")
    if content.get("version") != VERSION:
        raise NotFound(
            f"{path} is of version {content.get('version')!r}; this otel-ddp reads {VERSION}."
        )
    try:
        return side.of_json(content["compared"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise NotFound(f"{path} is damaged: {error!r}") from error
