"""Finds the run that a user means: by its name, its file or its folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from otel_ddp.history import directory
from otel_ddp.history.reader import History, Unreadable
from otel_ddp.history.whole_run import WholeRun


class NotFound(Exception):
    """No history is meant by these words, or several are; the text is for the user."""


def find_run(words: str, folder: Path, *, ours: bool = False) -> WholeRun:
    """The run of this name (`run` or `group/run`), of this file, or of this folder.

    *ours*: names are looked up in *folder* only where no other user could have put a file.
    """
    path = Path(words).expanduser()
    if path.is_file():
        return WholeRun([History(path)])
    if path.is_dir():
        return _only_run(path)
    known = _looked_up(folder, ours)
    found = [each for each in known if words in (each.run, each.title)]
    if not found:
        has = _few(each.run for each in known)
        raise NotFound(
            f"{words!r} is no file and no folder, and {folder} has no history of a run with this "
            f"name{f'; it has {has}' if has else ''}."
        )
    titles = {each.title for each in found}
    if len(titles) > 1:
        raise NotFound(f"Several runs are called {words!r}: {_few(titles)}. Give one of these.")
    return WholeRun([History(each.path) for each in found])


def newest_run(folder: Path, *, ours: bool = False) -> WholeRun:
    """The run that was written to last."""
    known = _looked_up(folder, ours)
    if not known:
        raise NotFound(f"{folder} has no history of a run.")
    newest = max(known, key=lambda each: each.seen_ns)
    return WholeRun([History(each.path) for each in known if each.title == newest.title])


class _Known(NamedTuple):
    path: Path
    group: str
    run: str
    seen_ns: int

    @property
    def title(self) -> str:
        return f"{self.group}/{self.run}"


def _looked_up(folder: Path, ours: bool) -> list[_Known]:
    if ours and (why := directory.why_not_ours(folder)):
        raise NotFound(f"no history is read: {why}")
    return list(_known(folder))


def _known(folder: Path) -> Iterator[_Known]:
    for path in sorted(directory.histories(folder)):
        if (found := _look(path)) is not None:
            yield found


def _look(path: Path) -> _Known | None:
    try:
        with History(path) as history:
            about = history.about
    except Unreadable:
        return None
    group, run = str(about.get("group") or ""), str(about.get("run") or "")
    seen_ns = about.get("seen_ns")
    return _Known(path, group, run, seen_ns if isinstance(seen_ns, int) else 0)


def _only_run(folder: Path) -> WholeRun:
    known = list(_known(folder))
    titles = {each.title for each in known}
    if len(titles) == 1:
        return WholeRun([History(each.path) for each in known])
    if titles:
        raise NotFound(f"{folder} has several runs: {_few(titles)}. Name the file of one.")
    for path in directory.histories(folder):
        # Raises Unreadable, which says why.
        History(path).close()
    raise NotFound(f"{folder} has no history of a run.")


def _few(names: Iterable[str]) -> str:
    found = sorted(set(names))
    return ", ".join(found[:5]) + (", ..." if len(found) > 5 else "")
