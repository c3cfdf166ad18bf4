"""Words for numbers, and texts that cannot do anything to a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))


def shown_s(seconds: float | None) -> str:
    """20.1 ms; 3 h 20 min."""
    if seconds is None:
        return "-"
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:.1f} min"
    if not seconds:
        return "0 s"
    # 999.6 us are 1 ms.
    size, unit = next((each for each in _UNITS if abs(seconds) >= 0.9995 * each[0]), _UNITS[-1])
    return f"{seconds / size:.3g} {unit}" if abs(seconds) < 99.95 else f"{seconds:.0f} s"


def shown_time(time_ns: int, now_ns: int) -> str:
    """The time of day here, with the date where that is another one."""
    at, now = time.localtime(time_ns / 1e9), time.localtime(now_ns / 1e9)
    same_day = (at.tm_year, at.tm_yday) == (now.tm_year, now.tm_yday)
    return time.strftime("%H:%M:%S" if same_day else "%Y-%m-%d %H:%M:%S", at)


def when(verdict: Mapping[str, Any], now_ns: int) -> str:
    """What stands before a verdict's sentence, as an agent's file describes it.

    `since 16:45:10: ` while it holds, `16:45:10 to 16:47:02: ` later, `16:45:10: ` for a death.
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


def shown_number(value: float | None) -> str:
    """Five digits; a dash where there is none."""
    return "-" if value is None else f"{value:.5g}"


def shown_bytes(count: float) -> str:
    """81.6 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def printable(
    words: str, *, most: int = 1000, keeps: Callable[[str], bool] = str.isprintable
) -> str:
    """One line: ESC and newlines are written out."""
    return "".join(
        letter if keeps(letter) else letter.encode("unicode_escape").decode()
        for letter in words[:most]
    )
