"""Where the profiles that people ask for lie, and what each folder holds."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FILE = "profile.json"
_LARGEST_FILE = 1024 * 1024
_LONGEST_NAME = 80


class Profile(NamedTuple):
    """One folder with the traces of one window."""

    folder: Path
    content: Mapping[str, Any]
    """Its `profile.json`; any program of this user may have written it."""


def directory() -> Path:
    """On a disk, as post-mortems are: a trace is much larger than a journal."""
    return Path("/var/tmp") / f"otel_ddp-{os.geteuid()}" / "profiles"


def folder_name(run: str, asked: str) -> str:
    """The name of a folder: its run, and when it was asked for."""
    safe = re.sub(r"[^\w.-]+", "-", run).strip(".-")[:_LONGEST_NAME]
    return f"{safe or 'run'}-{asked}"


def of_run(group: str, run: str, root: Path | None = None) -> list[Profile]:
    """The profiles of a run on this node, the newest first."""
    wanted = {"group": group, "run": run}
    found = [each for each in _all(root or directory()) if wanted.items() <= each.content.items()]
    return sorted(found, key=_asked_ns, reverse=True)


def _asked_ns(profile: Profile) -> int:
    asked_ns = profile.content.get("asked_ns")
    return asked_ns if isinstance(asked_ns, int) else 0


def _all(root: Path) -> Iterator[Profile]:
    try:
        names = sorted(os.listdir(root))
    except OSError:
        return
    for name in names:
        path = root / name / FILE
        try:
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(path, flags), "rb") as file:
                content = json.loads(file.read(_LARGEST_FILE))
        except (OSError, ValueError, RecursionError):
            continue  # a window that is under way, or no folder of ours
        if isinstance(content, dict):
            yield Profile(root / name, content)
