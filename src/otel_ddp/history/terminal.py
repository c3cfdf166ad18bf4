"""Times and tables as text that is safe for a terminal."""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

_MENTION = re.compile(r"[@<!](?=[\w@!#&/])")


def shown_time(time_ns: int, now_ns: int) -> str:
    """The local time of day, with the date if it is not today."""
    at, now = time.localtime(time_ns / 1e9), time.localtime(now_ns / 1e9)
    same_day = (at.tm_year, at.tm_yday) == (now.tm_year, now.tm_yday)
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", at)


def when(verdict: Mapping[str, Any], now_ns: int) -> str:
    """The time of a verdict, to put before its sentence.

    An open verdict has `since 16:45:10: `, a past one `16:45:10 to 16:47:02: `, and a death, which
    is a moment, `16:45:10: `.
    """
    since, until = (
        shown_time(at_ns, now_ns) if isinstance(at_ns, int) and 0 < at_ns < 2**63 else ""
        for at_ns in (verdict.get("since_ns"), verdict.get("until_ns"))
    )
    if not since:
        return ""
    if verdict.get("kind") == "death":
        return f"{since}: "
    return f"{since} to {until}: " if until else f"since {since}: "


def where_to_look(led_by: str) -> str:
    """The hint that the node *led_by* shows all ranks, as its agent judges the run."""
    return f"all ranks of this run are shown on {printable(led_by)}" if led_by else ""


def printable(words: str, *, most: int = 1000) -> str:
    """One line, with control characters escaped."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in words[:most]
    )


def without_mentions(words: str) -> str:
    """Break up mentions: `@everyone` of Discord, `<!channel>` of Slack, `@user` of GitHub.

    Inserts a zero-width space after the sign. To escape the sign is not enough: GitHub would still
    notify the user.
    """
    return _MENTION.sub("\\g<0>\u200b", words)


def aligned(rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> Iterator[str]:
    """The lines of a table; the first row is the header. *right*: columns to align to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            text.rjust(width) if head in right else text.ljust(width)
            for text, width, head in zip(row, widths, rows[0], strict=True)
        )
        yield "  ".join(cells).rstrip()
