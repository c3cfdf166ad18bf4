"""Words for numbers, and texts that cannot do anything to a terminal."""

from __future__ import annotations

from collections.abc import Callable

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
