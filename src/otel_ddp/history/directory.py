"""Where histories lie: their names, what there is, and which go when there is too much."""

from __future__ import annotations

import contextlib
import logging
import re
import stat
from collections.abc import Collection, Iterator
from hashlib import blake2s
from pathlib import Path

from otel_ddp import files
from otel_ddp.history.schema import APPLICATION, SUFFIX

log = logging.getLogger("otel_ddp.history")

_LONGEST_NAME = 100
# As `file_name` makes them.
_OUR_NAME = re.compile(rf".+-[0-9a-f]{{10}}{re.escape(SUFFIX)}")
# Where SQLite writes the id of the application that a file is of.
_APPLICATION_AT = 68
# SQLite's files beside a database that is open.
_BESIDE = ("-wal", "-shm", "-journal")


def default_directory(named: str) -> Path:
    """The directory of histories: on a disk, so that they survive a reboot."""
    if named:
        return Path(named).absolute()
    return files.default_root() / "history"


def file_name(group: str, run: str, node: str) -> str:
    """The same whenever the run goes on; readable, and different for every run and node."""
    word = re.sub(r"[^\w.-]+", "_", run).encode()[:_LONGEST_NAME].decode(errors="ignore")
    digest = blake2s(repr((group, run, node)).encode("utf-8", "replace"), digest_size=5)
    return f"{word.lstrip('.') or 'run'}-{digest.hexdigest()}{SUFFIX}"


def histories(directory: Path) -> Iterator[Path]:
    """The histories in a directory; a link is none."""
    with contextlib.suppress(OSError):
        yield from filter(_is_file, directory.glob(f"*{SUFFIX}"))


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False  # deleted meanwhile: the others are still there


def why_not_ours(directory: Path) -> str:
    """What another user may have put where our own histories lie; empty if nothing."""
    try:
        files.check_kept(directory)
        for path in histories(directory):
            with contextlib.suppress(FileNotFoundError):
                files.check_own(path)
    except OSError as error:
        return f"{error.filename} {error.strerror}"
    return ""


def delete_oldest(directory: Path, most_bytes: int, keep: Collection[Path]) -> None:
    """Delete our histories, the oldest first, until the rest fits; those of *keep* stay.

    The user may have named a directory with databases of their own: these neither count nor go.
    """
    found = []
    for path in histories(directory):
        with contextlib.suppress(OSError):
            if _OUR_NAME.fullmatch(path.name) and (path in keep or _is_ours(path)):
                found.append((path.stat().st_mtime, path, _size(path)))
    total = sum(size for _, _, size in found)
    for _, path, size in sorted(found):
        if total <= most_bytes:
            break
        if path in keep:
            continue
        try:
            path.unlink()
        except OSError:
            continue
        files.remove(*_beside(path))
        log.info(
            "the history %s was deleted: all of them together may take %d bytes "
            "(OTEL_DDP_HISTORY_BYTES)",
            *(path, most_bytes),
        )
        total -= size


def _is_ours(path: Path) -> bool:
    files.check_own(path)
    with open(path, "rb") as file:
        file.seek(_APPLICATION_AT)
        return file.read(4) == APPLICATION.to_bytes(4, "big")


def _beside(path: Path) -> Iterator[Path]:
    return (path.with_name(path.name + suffix) for suffix in _BESIDE)


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in (path, *_beside(path)) if each.exists())
