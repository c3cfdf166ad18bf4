"""Writes the copy of a history that another node keeps. What that node sends is not trusted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from otel_ddp import plain
from otel_ddp.history.newest_attempt import is_silent
from otel_ddp.history.reader import History, Unreadable
from otel_ddp.history.run_file import MOST_OF_SERIES, RunFile, Unusable, table_of
from otel_ddp.history.tables import Event, Rows

COPY = "copy"
"""The key of `about` that marks a copy: a file without it is its node's own."""
_MOST_RANKS = 1024


def is_written_here(path: Path) -> bool:
    """Whether the agent of the node that this history is of writes it itself, at this time."""
    try:
        with History(path) as found:
            about = found.about
    except Unreadable:
        return False
    return COPY not in about and not is_silent("running", plain.whole(about.get("seen_ns")) or 0)


class CopiedFile(RunFile):
    """As a RunFile, but its rows take the place of those that are there."""

    def __init__(self, path: Path) -> None:
        """As RunFile. Unusable too where the node itself writes this file: its home is ours."""
        super().__init__(path)
        try:
            with self._transaction():
                known = self.texts("about")
                if known and COPY not in known:
                    raise Unusable(f"{path.name} is written by its node itself")
                self._put("about", "key", "value", {COPY: True})
        except BaseException:
            self.close()
            raise

    def replace(
        self,
        *,
        rows: Iterable[Rows] = (),
        about: Mapping[str, Any] = {},
        ranks: Mapping[str, Mapping[str, Any]] = {},
        events: Iterable[tuple[int, Event]] = (),
    ) -> None:
        """Put what the node's own file holds in place of what is here: sent twice, it is here once.

        All this, or nothing: raises sqlite3.Error.
        """
        with self._transaction():
            for each in rows:
                self._replace(each)
            self._put("about", "key", "value", about)
            self._put("ranks", "rank", "about", ranks)
            self._add_events(events)
            self._db.execute(
                "DELETE FROM ranks WHERE rowid <= (SELECT rowid FROM ranks "
                "ORDER BY rowid DESC LIMIT 1 OFFSET ?)",
                (_MOST_RANKS,),
            )

    def _replace(self, found: Rows) -> None:
        key, table = found.key, table_of(found.key)
        series = self._series.get(key) or self._make(key)
        if series is None:
            return
        if found.width < series.width:
            # The node's file was removed, and began anew.
            self._db.execute(f"DELETE FROM {table.name} WHERE series = ?", (series.id,))
        if found.width != series.width:
            self._set_width(table, series, found.width)
        self._db.executemany(table.replace, [(series.id, *row) for row in found.rows])
        series.buckets += len(found.rows)
        if series.buckets > MOST_OF_SERIES:
            # The node's own file has fewer: what is too old here is not there any more.
            self._db.execute(
                f"DELETE FROM {table.name} WHERE series = ? AND start <= (SELECT start "
                f"FROM {table.name} WHERE series = ? ORDER BY start DESC LIMIT 1 OFFSET ?)",
                (series.id, series.id, MOST_OF_SERIES),
            )
            count = f"SELECT count(*) FROM {table.name} WHERE series = ?"
            series.buckets = self._db.execute(count, (series.id,)).fetchone()[0]
