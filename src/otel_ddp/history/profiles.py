"""Where the profiles that people ask for lie, and what each folder holds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import files

FILE = "profile.json"
_TRACE = re.compile(r"rank-[0-9]+\.json\.gz")
_LARGEST_FILE = 1024 * 1024
_LONGEST_NAME = 80
_LONGEST_OPERATOR = 200


class Profile(NamedTuple):
    """One folder with the traces of one window."""

    folder: Path
    content: Mapping[str, Any]
    """Its `profile.json`; any program of this user may have written it."""

    @property
    def asked_ns(self) -> int:
        asked_ns = self.content.get("asked_ns")
        return asked_ns if isinstance(asked_ns, int) else 0

    @property
    def why(self) -> str:
        """Why these ranks, and what the comparison says."""
        return ". ".join(str(said) for key in ("why", "culprit") if (said := self.content.get(key)))

    @property
    def traces(self) -> list[Path]:
        """Of one rank each."""
        files = self.content.get("files")
        names = [each for each in files if isinstance(each, str)] if isinstance(files, list) else []
        return [self.folder / each for each in names if _TRACE.fullmatch(each)]

    @property
    def ranks(self) -> list[int]:
        """Those with a trace, the suspect first: as the columns of the table."""
        ranks = [each for each in _mappings(self.content.get("ranks")) if each.get("file")]
        return [each["rank"] for each in ranks if isinstance(each.get("rank"), int)]

    def described(self, most: int) -> dict[str, Any]:
        """With at most so many rows of the table that `otel-ddp profile` prints.

        They are those in which the ranks differ most; where there is one rank, what takes longest.
        """
        rows = [_operator(each) for each in _mappings(self.content.get("table"))]
        return {
            "asked_ns": self.asked_ns,
            "why": self.why,
            "ranks": self.ranks,
            "traces": [str(path) for path in self.traces],
            "operators": [row for row in rows if row and len(row["times_s"]) == len(self.ranks)][
                :most
            ],
        }


def directory() -> Path:
    """On a disk, as post-mortems are: a trace is much larger than a journal."""
    return files.default_root() / "profiles"


def folder_name(run: str, asked: str) -> str:
    """The name of a folder: its run, and when it was asked for."""
    safe = re.sub(r"[^\w.-]+", "-", run).strip(".-")[:_LONGEST_NAME]
    return f"{safe or 'run'}-{asked}"


def of_run(group: str, run: str, root: Path | None = None) -> list[Profile]:
    """The profiles of a run on this node, the newest first."""
    wanted = {"group": group, "run": run}
    found = [each for each in _all(root or directory()) if wanted.items() <= each.content.items()]
    return sorted(found, key=lambda each: each.asked_ns, reverse=True)


def _operator(row: Mapping[str, Any]) -> dict[str, Any] | None:
    times_s = row.get("times_s")
    if not isinstance(times_s, list) or not all(isinstance(s, (int, float)) for s in times_s):
        return None
    name = f"{row.get('operator') or ''}{' (device)' if row.get('on_device') else ''}"
    return {"operator": name[:_LONGEST_OPERATOR], "times_s": times_s}


def _mappings(found: Any) -> list[Mapping[str, Any]]:
    rows = found if isinstance(found, list) else []
    return [each for each in rows if isinstance(each, Mapping)]


def _all(root: Path) -> Iterator[Profile]:
    try:
        names = sorted(os.listdir(root)) if files.is_kept(root) else []
    except OSError:
        return
    for name in names:
        # Empty: a window is under way, or it is no folder of ours.
        if content := files.read_mapping(root / name / FILE, _LARGEST_FILE):
            yield Profile(root / name, content)
