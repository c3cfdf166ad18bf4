"""The agent's artifacts in a file of its directory, so that the next agent goes on with them."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from otel_ddp.agent.artifacts.artifact import Artifact, from_json
from otel_ddp.errors import foreign_json

# More than the list can hold.
_MOST_BYTES = 128 * 1024 * 1024


def read(path: Path) -> list[Artifact]:
    """What is in such a file; nothing of a damaged one."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return []
    try:
        with open(fd, "rb") as file:
            content = foreign_json.parse(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return []
    rows = content if isinstance(content, list) else []
    return [found for found in map(from_json, rows) if found is not None]


def keep(path: Path, artifacts: Iterable[Artifact]) -> None:
    """Write them all, or leave the file as it is."""
    content = json.dumps([each.to_json() for each in artifacts])
    half = path.with_name(f"{path.name}.half")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    # A full or deleted directory: only the next agent would need the file.
    with contextlib.suppress(OSError):
        with open(os.open(half, flags, 0o600), "w") as file:
            file.write(content)
        half.replace(path)
