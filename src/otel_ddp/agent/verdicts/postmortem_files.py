"""Keeps the newest post-mortems in one directory: whole files, and only this user's."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from otel_ddp import files

_KEPT = 50
_LONGEST_NAME = 120
_MOST_NUMBERS = 10_000
_STALE_S = 60.0

_OURS = re.compile(r"(postmortem-.+)\.(?:json|txt)")
# An unfinished file has another ending: a search for `*.json` must not find it.
_UNFINISHED = re.compile(rf"\.{_OURS.pattern}\.half")


def save(directory: Path, run: str, content: str, text: str, earlier: Path | None) -> Path:
    """Write a `.json` and a `.txt`, or replace those of *earlier*; the path of the `.json`."""
    with _opened(directory) as opened:
        name = _write(opened, run, content, text, earlier)
        _delete_oldest(opened)
    return directory / f"{name}.json"


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    files.make_kept(directory)
    opened = files.open_private(directory, os.O_DIRECTORY)
    try:
        yield opened
    finally:
        os.close(opened)


def _write(opened: int, run: str, content: str, text: str, earlier: Path | None) -> str:
    if earlier is not None:
        name = earlier.stem
        _replace(opened, f"{name}.json", content)
    else:
        name = _write_new(opened, _safe(run), content)
    _replace(opened, f"{name}.txt", text)
    return name


def _write_new(opened: int, name: str, content: str) -> str:
    """Write under the first free name. Another agent may look for one at the same time."""
    for number in range(1, _MOST_NUMBERS):
        stem = f"postmortem-{name}" if number == 1 else f"postmortem-{name}-{number}"
        hidden = _unfinished(f"{stem}.json")
        if _exists(opened, f"{stem}.json"):
            continue
        try:
            _create(opened, hidden, content)
        except FileExistsError:
            continue  # another agent is writing it at this moment
        if _exists(opened, f"{stem}.json"):
            os.unlink(hidden, dir_fd=opened)
            continue
        os.rename(hidden, f"{stem}.json", src_dir_fd=opened, dst_dir_fd=opened)
        return stem
    raise FileExistsError(17, f"{_MOST_NUMBERS} post-mortems of this name are there already")


def _unfinished(name: str) -> str:
    return f".{name}.half"


def _replace(opened: int, name: str, content: str) -> None:
    hidden = _unfinished(name)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(hidden, dir_fd=opened)
    _create(opened, hidden, content)
    os.rename(hidden, name, src_dir_fd=opened, dst_dir_fd=opened)


def _create(opened: int, name: str, content: str) -> None:
    handle = files.create(name, opened)
    try:
        with open(handle, "wb") as file:
            file.write(content.encode("utf-8", "backslashreplace"))
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=opened)
        raise


def _exists(opened: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=opened, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _delete_oldest(opened: int) -> None:
    """Keep the newest, and no unfinished file of an agent that was killed."""
    newest: dict[str, float] = {}
    for name in os.listdir(opened):
        match, unfinished = _OURS.fullmatch(name), _UNFINISHED.fullmatch(name)
        if match is None and unfinished is None:
            continue
        try:
            found = os.stat(name, dir_fd=opened, follow_symlinks=False)
        except FileNotFoundError:
            continue
        if not stat.S_ISREG(found.st_mode):
            continue
        if match is not None:
            newest[match[1]] = max(found.st_mtime, newest.get(match[1], 0.0))
        elif time.time() - found.st_mtime > _STALE_S:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=opened)
    for stem in sorted(newest, key=lambda stem: newest[stem])[:-_KEPT]:
        for ending in ("json", "txt"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{stem}.{ending}", dir_fd=opened)


def _safe(run: str) -> str:
    """The name of a run, as part of a file name."""
    name = re.sub(r"[^\w.-]+", "_", run).encode()[:_LONGEST_NAME].decode(errors="ignore")
    return name or "run"
