"""The directory of histories: finds a run by name or path; changes and deletes histories."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2s
from pathlib import Path
from typing import Any

from otel_ddp import errors, files, plain
from otel_ddp.history.reader import History, Unreadable
from otel_ddp.history.run_file import RunFile
from otel_ddp.history.tables import SUFFIX, RunKey, beside, is_history
from otel_ddp.history.whole_run import WholeRun

log = logging.getLogger("otel_ddp.history")

_LONGEST_NAME = 100
# Matches the names that `file_name` makes.
_OUR_NAME = re.compile(rf".+-[0-9a-f]{{10}}{re.escape(SUFFIX)}")
# To open a run of more histories than this, the process raises its limit of open files.
_MANY = 16
_POSTMORTEM_NAME = re.compile(r"postmortem-[\w.-]+")
_LARGEST_POSTMORTEM = 16 * 1024 * 1024
_MOST_POSTMORTEMS = 200


def default_directory(named: str) -> Path:
    """The directory of histories. *named*: the user's setting; empty for the default directory."""
    return Path(named) if named else files.default_root() / "history"


def file_name(group: str, run: str, node: str) -> str:
    """A readable name that is unique to the run and node."""
    word = re.sub(r"[^\w.-]+", "_", run).encode()[:_LONGEST_NAME].decode(errors="ignore")
    digest = blake2s(repr((group, run, node)).encode("utf-8", "replace"), digest_size=5)
    return f"{word.lstrip('.') or 'run'}-{digest.hexdigest()}{SUFFIX}"


def histories(directory: Path) -> Iterator[Path]:
    """The histories in a directory. Symbolic links are skipped."""
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for each in entries:
            if each.name.endswith(SUFFIX) and each.is_file(follow_symlinks=False):
                yield Path(each.path)


def why_not_ours(directory: Path) -> str:
    """The reason to distrust the directory: another user can write there. Empty if none can."""
    try:
        files.check_kept(directory)
        for path in histories(directory):
            with contextlib.suppress(FileNotFoundError):
                files.check_own(path)
    except OSError as error:
        return f"{error.filename} {error.strerror}"
    return ""


def delete_oldest(directory: Path, most_bytes: int, keep: Collection[Path]) -> None:
    """Delete the oldest histories, except *keep*, until the rest takes at most *most_bytes*.

    Other databases in the directory are neither counted nor deleted.
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
        if path not in keep:
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size
                files.remove(*beside(path))
                limit = f"all may take {most_bytes} bytes (OTEL_DDP_HISTORY_BYTES)"
                log.info("the history %s was deleted: %s", path, limit)


def _is_ours(path: Path) -> bool:
    files.check_own(path)
    return is_history(path)


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in (path, *beside(path)) if each.exists())


# -- changes by a user to a run that is over


def change(paths: Iterable[Path], texts: Mapping[str, str]) -> None:
    """Store texts of a run that a user changed. They replace the texts that the program set.

    Raises OSError or sqlite3.Error.
    """
    for each in paths:
        # SQLite creates files of its own in this folder, so no other user may write to it.
        with files.own_directory(each.parent), contextlib.closing(RunFile(each)) as file:
            # Stored apart from `texts`, which an agent may overwrite with the program's texts.
            file.write(about={"changed": {**(file.about("changed") or {}), **texts}})


def delete(paths: Iterable[Path]) -> None:
    """Delete the histories of a run. Raises OSError."""
    for each in paths:
        with files.own_directory(each.parent):
            files.check_own(each)
            each.unlink()
            files.remove(*beside(each))


# -- finding the run that a user means


class NotFound(errors.OtelDdpError):
    """No history matches, or several do. The message is for the user."""


def find_run(words: str, folder: Path, *, paths: bool = True) -> WholeRun:
    """The run of this name (`run` or `group/run`) or path; the newest run if *words* is empty.

    Names are looked up in *folder*, unless another user can write there. *paths*: False to allow
    only names, for a caller that may not read the user's files.
    """
    why = why_not_ours(folder)
    known = {} if why else _known(folder)
    found = {key: each for key, each in known.items() if words in ("", key[1], "/".join(key))}
    path = _path(words) if paths and not found else None
    if path is not None and path.is_file():
        return open_run([path.resolve()])
    if path is not None:
        why, folder, found = "", path, _known(path)
        for each in () if found else histories(path):
            # No history at the path could be used. Open each again: if one cannot be read, this
            # raises Unreadable with the reason.
            History(each).close()
    if why:
        raise NotFound(f"no history is read: {why}")
    if words and path is None and not found:
        has = _few({run for _, run in known})
        neither = "is no file and no folder, and " if paths else "is no run: "
        raise NotFound(
            f"{words[:_LONGEST_NAME]!r} {neither}{folder} has no history of a run with this name"
            f"{f'; it has {has}' if has else ''}."
        )
    if not found:
        raise NotFound(f"{folder} has no history of a run.")
    if len(found) > 1 and words:
        titles, way = _few(map("/".join, found)), "the file of one" if path else "one of these"
        raise NotFound(f"{words!r} has several runs: {titles}. Name {way}.")
    newest = max(found.values(), key=lambda each: max(each.values()))
    return open_run(newest)


def _path(words: str) -> Path | None:
    """The existing file or folder of this name, or None."""
    path = os.path.expanduser(words)
    return Path(path) if words and os.path.exists(path) else None


def open_run(paths: Collection[Path]) -> WholeRun:
    """The run with these histories; raises Unreadable."""
    if len(paths) > _MANY:
        # SQLite opens up to three files for each history.
        files.raise_file_limit()
    with contextlib.ExitStack() as opened:
        run = WholeRun([opened.enter_context(History(each)) for each in paths])
        opened.pop_all()
    return run


def _known(folder: Path) -> dict[RunKey, dict[Path, int]]:
    """The history files of each run, with the time of the last write to each file."""
    found: dict[RunKey, dict[Path, int]] = {}
    for path in sorted(histories(folder)):
        with contextlib.suppress(Unreadable), History(path) as history:
            about = history.about
            key = str(about.get("group") or ""), str(about.get("run") or "")
            found.setdefault(key, {})[path] = plain.whole(about.get("seen_ns")) or 0
    return found


def _few(names: Iterable[str]) -> str:
    found = sorted(set(names))
    return ", ".join(found[:5]) + (", and more" if len(found) > 5 else "")


# -- post-mortems, which agents write beside the histories


def postmortems(folder: Path, group: str, run: str) -> list[dict[str, Any]]:
    """The post-mortems of a run, latest first. Unreadable files are skipped."""
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        paths = sorted(folder.glob("postmortem-*.json"), key=lambda path: -path.stat().st_mtime)
    found = []
    for path in paths[:_MOST_POSTMORTEMS]:
        report = files.read_mapping(path, _LARGEST_POSTMORTEM)
        verdict = plain.mapping(report.get("verdict"))
        its_group = plain.mapping(verdict.get("who")).get("group")
        if report.get("run") == run and its_group in (None, group):
            found.append(
                {
                    "name": path.stem,
                    "path": str(path),
                    "written_ns": plain.whole(report.get("written_ns")) or 0,
                    "sentence": str(verdict.get("sentence") or ""),
                }
            )
    return sorted(found, key=lambda each: -each["written_ns"])


def postmortem(folder: Path, name: str) -> str | None:
    """The text of one post-mortem; None if no post-mortem has this name."""
    if not _POSTMORTEM_NAME.fullmatch(name):
        return None
    try:
        return files.read(folder / f"{name}.json", _LARGEST_POSTMORTEM).decode("utf-8", "replace")
    except OSError:
        return None
