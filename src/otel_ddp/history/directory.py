"""The directory of histories: which there are, which run a user means, and which of them go."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2s
from pathlib import Path

from otel_ddp import errors, files, plain
from otel_ddp.history.reader import History, Unreadable
from otel_ddp.history.tables import SUFFIX, RunKey, beside, is_history
from otel_ddp.history.whole_run import WholeRun

log = logging.getLogger("otel_ddp.history")

_LONGEST_NAME = 100
# As `file_name` makes them.
_OUR_NAME = re.compile(rf".+-[0-9a-f]{{10}}{re.escape(SUFFIX)}")
# So many histories of one run are many open files.
_MANY = 16


def default_directory(named: str) -> Path:
    """The directory of histories: on a disk, so that they survive a reboot."""
    return Path(named) if named else files.default_root() / "history"


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
        files.remove(*beside(path))
        log.info(
            "the history %s was deleted: all of them together may take %d bytes "
            "(OTEL_DDP_HISTORY_BYTES)",
            *(path, most_bytes),
        )
        total -= size


def _is_ours(path: Path) -> bool:
    files.check_own(path)
    return is_history(path)


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in (path, *beside(path)) if each.exists())


# -- the run that a user means


class NotFound(errors.OtelDdpError):
    """No history is meant by these words, or several are; the text is for the user."""


def find_run(words: str, folder: Path, *, paths: bool = True) -> WholeRun:
    """The run of this name (`run` or `group/run`), of this file, or of this folder.

    Without words it is the run that was written to last. A name counts before a path. Names are
    looked up in *folder* only where no other user could have put a file.

    *paths*: False where whoever asks may know the runs in *folder*, and not the files of its user.
    """
    why = why_not_ours(folder)
    known = {} if why else _known(folder)
    found = {key: each for key, each in known.items() if words in ("", key[1], "/".join(key))}
    path = _path(words) if paths and not found else None
    if path is not None:
        return open_run([path.resolve()]) if path.is_file() else _run_of(path)
    if why:
        raise NotFound(f"no history is read: {why}")
    if words and not found:
        has = _few({run for _, run in known})
        neither = "is no file and no folder, and " if paths else "is no run: "
        raise NotFound(
            f"{words[:_LONGEST_NAME]!r} {neither}{folder} has no history of a run with this name"
            f"{f'; it has {has}' if has else ''}."
        )
    if not found:
        raise NotFound(f"{folder} has no history of a run.")
    if len(found) > 1 and words:
        titles = _few(map("/".join, found))
        raise NotFound(f"Several runs are called {words!r}: {titles}. Give one of these.")
    return open_run(_newest(found))


def _path(words: str) -> Path | None:
    """The file or folder of this name; None if there is none, or none can have this name."""
    path = os.path.expanduser(words)
    return Path(path) if words and os.path.exists(path) else None


def _run_of(folder: Path) -> WholeRun:
    """The only run of a folder."""
    found = _known(folder)
    if not found:
        for each in histories(folder):
            # Raises Unreadable, which says why.
            History(each).close()
        raise NotFound(f"{folder} has no history of a run.")
    if len(found) > 1:
        titles = _few(map("/".join, found))
        raise NotFound(f"{folder} has several runs: {titles}. Name the file of one.")
    return open_run(_newest(found))


def _newest(found: Mapping[RunKey, Mapping[Path, int]]) -> Collection[Path]:
    return max(found.values(), key=lambda each: max(each.values()))


def open_run(paths: Collection[Path]) -> WholeRun:
    """The run of which these are the histories; raises Unreadable."""
    if len(paths) > _MANY:
        # With SQLite's own beside them, they may be more than a process may have open by default.
        files.raise_file_limit()
    with contextlib.ExitStack() as opened:
        run = WholeRun([opened.enter_context(History(each)) for each in paths])
        opened.pop_all()
    return run


def _known(folder: Path) -> dict[RunKey, dict[Path, int]]:
    """By group and run: its files, and when each was last written to."""
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
