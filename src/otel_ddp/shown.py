"""Formats durations, shares, sizes and logged values for people; static/shown.js does the same."""

from __future__ import annotations

import math
from typing import Any

from otel_ddp import plain

_UNKNOWN = "-"
# For each unit: the shortest duration that is shown in it, its length in seconds, and its name.
_DURATIONS = (
    (0.9995, 1.0, "s"),
    (0.9995e-3, 1e-3, "ms"),
    (0.9995e-6, 1e-6, "us"),
    (1e-12, 1e-9, "ns"),
)
# Longer durations are shown in two units, as in 3 h 18 min. For each pair of units: the shortest
# duration that is shown in them, the number of small units in a large one, the length of the small
# unit in seconds, and the names of both.
_LONG = (
    (86_370.0, 24, 3600.0, "d", "h"),
    (3599.5, 60, 60.0, "h", "min"),
    (119.5, 60, 1.0, "min", "s"),
)
_SIZES = ("B", "kB", "MB", "GB", "TB")


def seconds(value: float | None) -> str:
    """A duration, as in 20.1 ms, 8 min 53 s, 3 h 18 min."""
    if value is None:
        return _UNKNOWN
    for least, many, length, large, small in _LONG:
        if abs(value) >= least:
            whole, rest = divmod(math.floor(abs(value) / length + 0.5), many)
            words = f"{whole} {large} {rest} {small}" if rest else f"{whole} {large}"
            return f"-{words}" if value < 0 else words
    for least, length, unit in _DURATIONS:
        if abs(value) >= least:
            return f"{_three_digits(value / length)} {unit}"
    return "0 s"


def share(value: float | None) -> str:
    """A share, as in 32.1 %."""
    return _UNKNOWN if value is None else f"{_three_digits(100 * value)} %"


def size(count: float | None) -> str:
    """A number of bytes, as in 81.6 GB."""
    if count is None:
        return _UNKNOWN
    at = 0
    while abs(count) >= 999.5 and at < len(_SIZES) - 1:
        count /= 1000
        at += 1
    return f"{_three_digits(count)} {_SIZES[at]}"


def number(value: float | None) -> str:
    """A logged value with five digits, because two losses may differ only in the fourth."""
    if value is None:
        return _UNKNOWN
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    if 1e-4 <= abs(value) < 1e15:
        return f"{value:.5g}" if abs(value) < 99999.5 else str(math.floor(value + 0.5))
    digits, power = f"{value:.4e}".split("e")
    return f"{float(digits):g}e{int(power)}"


def logged(point: Any) -> str:
    """The value of a logged point, which JSON writes as null if it is NaN; `-` if it has none."""
    value = plain.mapping(point).get("value", _UNKNOWN)
    if value is None or value != value:
        return number(math.nan)
    return number(plain.number(value, -math.inf, math.inf))


def name(words: str, split: str) -> str:
    """The name of a value, as in `loss (val)`. The split is omitted if it is train or unknown."""
    return words if split in ("", "train") else f"{words} ({split})"


def _three_digits(value: float) -> str:
    if abs(value) >= 999.5:
        return str(math.floor(value + 0.5))
    return f"{value:.3g}" if abs(value) >= 1e-3 else "0"
