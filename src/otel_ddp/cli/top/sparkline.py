"""Draws numbers as a line of small bars."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=+*%#"


def sparkline(numbers: Sequence[float | None], most: float, *, plain: bool = False) -> str:
    """A bar for each number, as a share of *most*; a blank for None."""
    bars = _PLAIN_BARS if plain else _BARS
    return "".join(
        " " if each is None or most <= 0 else bars[_level(each / most, len(bars))]
        for each in numbers
    )


def _level(share: float, levels: int) -> int:
    return min(levels - 1, max(0, round(share * (levels - 1))))
