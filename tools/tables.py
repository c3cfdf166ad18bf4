"""Puts generated rows into the tables of a page; all else on it stays as people wrote it."""

from __future__ import annotations

from collections.abc import Iterable


def with_rows(page: str, heading: str, rows: Iterable[str]) -> str:
    """The page with these rows in the first table below a heading, whose two first lines stay."""
    before, found, below = f"\n{page}".partition(f"\n{heading}\n")
    above, bar, table = below.partition("\n|---")
    assert bar, f"there is no table below {heading}"
    first, _, after = table.partition("\n\n")
    rule = first.partition("\n")[0]
    behind = f"\n\n{after}" if after else "\n"
    return "".join([before, found, above, bar, "\n".join([rule, *rows]), behind]).removeprefix("\n")
