"""A model of the transformations of Grafana 12 that the panels of Compare use, on tables.

It holds what no other test does: that the curves on Compare have the values that were logged,
against steps, epochs, tokens and time, also for a resumed run. The test with a browser sees only
that each panel draws something, and needs a Grafana and a Chromium.

Where Grafana is not what one expects the model follows it: rows that contradict each other stay
two, sorting is stable, and of several values for one cell of a matrix the last one stays. What our
panels do not use is an error here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from stack.servers import Series

# A number, a word, or a time in whole milliseconds. One that a row does not have is a hole.
Cell = Any
Row = dict[str, Cell]
Options = Mapping[str, Any]


class Frame(NamedTuple):
    """One table."""

    names: list[str]
    """Of its columns, in their order."""
    rows: list[Row]
    label: str = ""


class Refused(Exception):
    """A panel shows an error instead of a drawing."""


def tables(answers: Mapping[str, Sequence[Series]]) -> list[Frame]:
    """Answers over time in the format `table`, by the refs of their queries."""
    return [_table(f"Value #{ref}", series) for ref, series in answers.items()]


def _table(value: str, answer: Sequence[Series]) -> Frame:
    labels = list(dict.fromkeys(label for each in answer for label in sorted(each.labels)))
    rows = [
        {
            "Time": round(time_s * 1000),
            **{label: series.labels.get(label, "") for label in labels},
            value: number,
        }
        for series in answer
        for time_s, number in series.points
    ]
    return Frame(["Time", *labels, value], sorted(rows, key=lambda row: row["Time"]))


# -- the transformations


def transformed(frames: list[Frame], chain: Iterable[Mapping[str, Any]]) -> list[Frame]:
    """The tables after a panel's chain; a transformation that is unknown here is an error."""
    for each in chain:
        if each["id"] == "merge":
            frames = [_merge(frames)]
        else:
            change = _BY_ID[each["id"]]
            frames = [made for frame in frames for made in change(frame, each["options"])]
    return frames


def _merge(frames: list[Frame]) -> Frame:
    """Rows that agree in all that every table has become one row, unless they contradict."""
    names = list(dict.fromkeys(name for frame in frames for name in frame.names))
    common = [name for name in names if all(name in frame.names for frame in frames)]
    rows: list[Row] = []
    alike: dict[tuple[Cell, ...], list[Row]] = {}
    for row in (dict(row) for frame in frames for row in frame.rows):
        there = alike.setdefault(tuple(row[name] for name in common), [])
        # Every row that it does not contradict takes its cells.
        matching = [
            each
            for each in there
            if all(each.get(name, cell) == cell for name, cell in row.items())
        ]
        for each in matching:
            each.update(row)
        if not matching:
            there.append(row)
            rows.append(row)
    return Frame(names, rows)


def _organize(frame: Frame, options: Options) -> list[Frame]:
    left_out = {name for name, is_out in options.get("excludeByName", {}).items() if is_out}
    shown = {name: options["renameByName"].get(name, name) for name in frame.names}
    kept = [name for name in frame.names if name not in left_out]
    rows = [{shown[name]: row[name] for name in kept if name in row} for row in frame.rows]
    return [Frame([shown[name] for name in kept], rows)]


def _filter_by_value(frame: Frame, options: Options) -> list[Frame]:
    """Without the rows that have a hole in one of these fields."""
    assert (options["type"], options["match"]) == ("exclude", "any"), options
    assert {each["config"]["id"] for each in options["filters"]} == {"isNull"}, options
    wanted = {each["fieldName"] for each in options["filters"]}
    return [frame._replace(rows=[row for row in frame.rows if wanted <= row.keys()])]


def _sort_by(frame: Frame, options: Options) -> list[Frame]:
    """Empty words come last, and whether letters are capital ones does not count."""
    (by,) = (each["field"] for each in options["sort"])

    def key(row: Row) -> Any:
        return (not row[by], row[by].casefold()) if isinstance(row[by], str) else row[by]

    return [frame._replace(rows=sorted(frame.rows, key=key))]


def _group_by(frame: Frame, options: Options) -> list[Frame]:
    wanted: Mapping[str, Options] = options["fields"]
    by = [name for name in frame.names if name in wanted and not wanted[name]["aggregations"]]
    made = {
        f"{name} ({how})": (name, how)
        for name in frame.names
        if name in wanted
        for how in wanted[name]["aggregations"]
    }
    rows = [
        {
            **{name: group[0][name] for name in by},
            **{
                shown: _REDUCERS[how]([each[name] for each in group])
                for shown, (name, how) in made.items()
            },
        }
        for group in _groups(frame, by)
    ]
    return [Frame([*by, *made], rows)]


def _groups(frame: Frame, by: Sequence[str]) -> Iterable[list[Row]]:
    groups: dict[tuple[Cell, ...], list[Row]] = {}
    for row in frame.rows:
        groups.setdefault(tuple(row[name] for name in by), []).append(row)
    return groups.values()


def _grouping_to_matrix(frame: Frame, options: Options) -> list[Frame]:
    # Only this is modelled: "" would be text in a column of numbers.
    assert options["emptyValue"] == "null", options
    column, row, value = (options[f"{each}Field"] for each in ("column", "row", "value"))
    rows: dict[Cell, Row] = {}
    for each in frame.rows:
        rows.setdefault(each[row], {row: each[row]})[str(each[column])] = each[value]
    names = dict.fromkeys(str(each[column]) for each in frame.rows)
    return [Frame([row, *names], [*rows.values()])]


def _partition_by_values(frame: Frame, options: Options) -> list[Frame]:
    (by,) = options["fields"]
    names = [name for name in frame.names if name != by]
    return [Frame(names, group, group[0][by]) for group in _groups(frame, [by])]


_REDUCERS: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda numbers: sum(numbers) / len(numbers),
    "min": min,
    "max": max,
}
_BY_ID: dict[str, Callable[[Frame, Options], list[Frame]]] = {
    "organize": _organize,
    "filterByValue": _filter_by_value,
    "sortBy": _sort_by,
    "groupBy": _group_by,
    "groupingToMatrix": _grouping_to_matrix,
    "partitionByValues": _partition_by_values,
}


# -- the drawing

Curve = list[tuple[float, float]]


def trend(frames: list[Frame]) -> dict[str, Curve]:
    """The curves of a Trend panel, without holes; it takes one table with a rising first number."""
    if len(frames) != 1:
        raise Refused(f"{len(frames)} tables")
    (frame,) = frames
    x, *names = (
        name for name in frame.names if any(isinstance(row.get(name), float) for row in frame.rows)
    )
    # A hole at the end would pass with Grafana, and leave its axis without an end.
    across = [row[x] for row in frame.rows]
    # Grafana checks fifty points only, and draws a wrong curve if it misses one.
    for one, next_one in pairwise(across):
        if next_one <= one:
            raise Refused(f"{x}: {next_one} after {one}")
    return {name: points(frame, x, name) for name in names}


def points(frame: Frame, x: str, y: str) -> Curve:
    """The rows that have both, in their order."""
    return [(row[x], row[y]) for row in frame.rows if x in row and y in row]
