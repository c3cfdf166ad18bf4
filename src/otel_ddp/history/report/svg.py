"""Draws plots as SVG: curves with a band, stacked bars, heatmaps. All text is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 720, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 12, 10, 28
_MOST_POINTS = 400


def curve(title: str, points: Sequence[tuple[float, float, float, float]]) -> str:
    """A line of means in a band from the lowest to the highest; each point begins with its step."""
    points = _thinned(points)
    xs = _Axis([each[0] for each in points], _LEFT, WIDTH - _RIGHT)
    values = [value for each in points for value in each[1:]]
    ys = _Axis(values, HEIGHT - _BOTTOM, _TOP)
    upper = [f"{xs.at(x):.1f},{ys.at(high):.1f}" for x, _, _, high in points]
    lower = [f"{xs.at(x):.1f},{ys.at(low):.1f}" for x, low, _, _ in reversed(points)]
    line = " ".join(f"{xs.at(x):.1f},{ys.at(mean):.1f}" for x, _, mean, _ in points)
    parts = [*_grid(xs, ys), f'<polygon class="band" points="{" ".join([*upper, *lower])}"/>']
    if len(points) == 1:
        x, y = line.split(",")
        parts.append(f'<circle class="dot" cx="{x}" cy="{y}" r="3"/>')
    else:
        parts.append(f'<polyline class="line" points="{line}"/>')
    return _picture(title, parts)


def bar(title: str, shares: Mapping[str, tuple[float, str]]) -> str:
    """One stacked bar: each part has its share of 1 and its words."""
    parts, x = [], 0.0
    for number, (share, words) in enumerate(shares.values()):
        width = share * WIDTH
        parts.append(
            f'<rect class="part p{number % 9}" x="{x:.1f}" y="0" width="{width:.1f}" height="36">'
            f"<title>{escape(words)}</title></rect>"
        )
        x += width
    return _picture(title, parts, 36)


def heatmap(
    title: str,
    rows: Sequence[tuple[str, Sequence[float | None]]],
    columns: Sequence[str],
) -> str:
    """A cell for each row and column; its number is 0 for usual, 1 for half as much again."""
    high = max(6, min(18, 360 // max(len(rows), 1)))
    wide = (WIDTH - _LEFT - _RIGHT) / max(len(columns), 1)
    parts = []
    for y, (name, cells) in enumerate(rows):
        if high >= 9 or y % 4 == 0:
            parts.append(
                f'<text class="tick" x="{_LEFT - 6}" y="{y * high + high * 0.8:.1f}" '
                f'text-anchor="end">{escape(name)}</text>'
            )
        for x, heat in enumerate(cells):
            if heat is None:
                continue
            level = min(max(heat, 0.0), 1.0)
            parts.append(
                f'<rect class="cell" x="{_LEFT + x * wide:.1f}" y="{y * high}" '
                f'width="{wide:.1f}" height="{high - 1}" fill-opacity="{0.06 + 0.94 * level:.2f}"/>'
            )
    bottom = len(rows) * high
    parts.extend(
        f'<text class="tick" x="{_LEFT + x * wide:.1f}" y="{bottom + 16}">'
        f"{escape(columns[x])}</text>"
        for x in range(0, len(columns), max(1, len(columns) // 6))
    )
    return _picture(title, parts, bottom + 24)


def _picture(title: str, parts: Sequence[str], height: int = HEIGHT) -> str:
    words = escape(title)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{words}">'
        f"<title>{words}</title>{''.join(parts)}</svg>"
    )


def _grid(xs: _Axis, ys: _Axis) -> Iterator[str]:
    for value in ys.ticks(4):
        y = f"{ys.at(value):.1f}"
        yield f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        yield (
            f'<text class="tick" x="{_LEFT - 6}" y="{y}" dy="4" text-anchor="end">{value:.4g}'
            "</text>"
        )
    for value in xs.ticks(6):
        yield (
            f'<text class="tick" x="{xs.at(value):.1f}" y="{HEIGHT - 8}" text-anchor="middle">'
            f"{value:g}</text>"
        )


class _Axis:
    """Where the numbers of an axis lie on the picture."""

    def __init__(self, numbers: Sequence[float], start: float, end: float) -> None:
        self._low, self._high = min(numbers), max(numbers)
        if self._low == self._high:
            reach = abs(self._low) / 10 or 1.0
            self._low, self._high = self._low - reach, self._high + reach
        self._start, self._end = start, end

    def at(self, number: float) -> float:
        # Half of each: the difference of two large numbers may be no number.
        share = (number / 2 - self._low / 2) / (self._high / 2 - self._low / 2)
        return self._start + share * (self._end - self._start)

    def ticks(self, about: int) -> Iterator[float]:
        """Round numbers within, about as many as asked."""
        rough = (self._high / 2 - self._low / 2) / about * 2
        if not math.isfinite(rough) or rough <= 0:
            return
        size = 10.0 ** math.floor(math.log10(rough))
        step = next((f * size for f in (1, 2, 5, 10) if f * size >= rough), 10 * size)
        first = math.ceil(self._low / step)
        for number in range(12):
            if (value := (first + number) * step) > self._high:
                return
            yield value


def _thinned(
    points: Sequence[tuple[float, float, float, float]],
) -> list[tuple[float, float, float, float]]:
    by = -(-len(points) // _MOST_POINTS) or 1
    groups = [points[at : at + by] for at in range(0, len(points), by)]
    return [
        (
            group[0][0],
            min(each[1] for each in group),
            sum(each[2] for each in group) / len(group),
            max(each[3] for each in group),
        )
        for group in groups
    ]
