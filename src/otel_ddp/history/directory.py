"""Where histories lie: their names, what there is, and which go when there is too much."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator
from hashlib import blake2s
from pathlib import Path

from otel_ddp.history.schema import SUFFIX

_LONGEST_NAME = 100
# SQLite's files beside a database that is open.
_BESIDE = ("-wal", "-shm", "-journal")


def default_directory(named: str) -> Path:
    """The directory of histories: on a disk, so that they survive a reboot."""
    if named:
        return Path(named).absolute()
    return Path("/var/tmp") / f"otel_ddp-{os.geteuid()}" / "history"


def file_name(group: str, run: str, node: str) -> str:
    """The same whenever the run goes on; readable, and different for every run and node."""
    word = re.sub(r"[^\w.-]+", "_", run).encode()[:_LONGEST_NAME].decode(errors="ignore")
    digest = blake2s(repr((group, run, node)).encode("utf-8", "replace"), digest_size=5)
    return f"{word.lstrip('.') or 'run'}-{digest.hexdigest()}{SUFFIX}"


def files(directory: Path) -> Iterator[Path]:
    """The histories in a directory."""
    with contextlib.suppress(OSError):
        yield from (path for path in directory.glob(f"*{SUFFIX}") if path.is_file())


def delete_oldest(directory: Path, most_bytes: int, keep: Collection[Path]) -> None:
    """Delete histories, the oldest first, until the rest fits; those of *keep* stay."""
    found = []
    for path in files(directory):
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path, _size(path)))
    total = sum(size for _, _, size in found)
    for _, path, size in sorted(found):
        if total <= most_bytes:
            break
        if path in keep:
            continue
        for each in (path, *_beside(path)):
            with contextlib.suppress(OSError):
                each.unlink()
        total -= size


def _beside(path: Path) -> Iterator[Path]:
    return (path.with_name(path.name + suffix) for suffix in _BESIDE)


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in (path, *_beside(path)) if each.exists())
