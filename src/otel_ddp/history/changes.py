"""What a person changes of a run that is over: its name, its tags, or that it is kept."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from otel_ddp import files
from otel_ddp.history.run_file import RunFile
from otel_ddp.history.tables import beside


def describe(paths: Iterable[Path], texts: Mapping[str, str]) -> None:
    """These count from now on, whatever the program has said. Raises OSError or sqlite3.Error."""
    for each in paths:
        # SQLite opens paths by itself: nobody else may write beside them.
        with files.own_directory(each.parent), contextlib.closing(RunFile(each)) as file:
            file.change(texts)


def delete(paths: Iterable[Path]) -> None:
    """Delete the histories of a run. Raises OSError."""
    for each in paths:
        with files.own_directory(each.parent):
            files.check_own(each)
            each.unlink()
            files.remove(*beside(each))
