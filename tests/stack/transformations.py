"""A model of the transformations of Grafana 12 that our panels use, on tables.

It holds what no other test does: that the curves on Compare and Run have the values that were
logged, against steps, epochs, tokens and time, also for a resumed run. The test with a browser
sees only that each panel draws something, and needs a Grafana and a Chromium.

The model follows Grafana where a simpler one would pass wrong boards. A shown name is not the name
of the field. A cell that no row had is a hole. Sorting is stable. Of several values for one cell
of a matrix the last one stays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from stack.servers import Series

Cell = Any  # a number, a word, or None for a hole
Options = Mapping[str, Any]


class Field(NamedTuple):
    """One column."""

    name: str
    kind: Literal["time", "number", "string"]
    cells: list[Cell]
    renamed: str = ""
    """The name that `organize` gives it; all later transformations use that name."""
    labels: Mapping[str, str] = {}

    @property
    def shown(self) -> str:
        return self.renamed or " ".join((self.name, *self.labels.values()))


class Frame(NamedTuple):
    """One table."""

    fields: list[Field]

    @property
    def length(self) -> int:
        return len(self.fields[0].cells) if self.fields else 0

    def field(self, shown: str) -> Field | None:
        return next((each for each in self.fields if each.shown == shown), None)


class Refused(Exception):
    """A panel shows an error instead of a drawing."""


# -- the answers of the data source


def tables(answers: Mapping[str, Sequence[Series]]) -> list[Frame]:
    """Answers over time in the format `table`, by the refs of their queries."""
    return [
        _table(f"Value #{ref}" if len(answers) > 1 else "Value", series)
        for ref, series in answers.items()
    ]


def _table(value: str, answer: Sequence[Series]) -> Frame:
    labels = list(dict.fromkeys(label for each in answer for label in sorted(each.labels)))
    rows: list[list[Cell]] = [
        [time_s * 1000, *(series.labels.get(label, "") for label in labels), number]
        for series in answer
        for time_s, number in series.points
    ]
    rows.sort(key=lambda row: row[0])
    columns = list(zip(*rows, strict=True)) or [()] * (len(labels) + 2)
    heads: list[tuple[str, Literal["time", "number", "string"]]] = [
        ("Time", "time"),
        *((label, "string") for label in labels),
        (value, "number"),
    ]
    return Frame(
        [Field(name, kind, list(cells)) for (name, kind), cells in zip(heads, columns, strict=True)]
    )


# -- the transformations


def transformed(frames: list[Frame], chain: Iterable[Mapping[str, Any]]) -> list[Frame]:
    """The tables after a panel's chain; a transformation that is unknown here is an error."""
    for each in chain:
        frames = _BY_ID[each["id"]](frames, each["options"])
    return frames


def _merge(frames: list[Frame], _: Options) -> list[Frame]:
    """Rows that agree in all that every table has become one row, unless they contradict."""
    tables = [each for each in frames if each.fields]
    if len(frames) < 2 or not tables:
        return frames[:1] if len(frames) > 1 else frames
    fields = {each.name: each for table in reversed(tables) for each in reversed(table.fields)}
    order = list(dict.fromkeys(each.name for table in tables for each in table.fields))
    common = [name for name in order if all(_has(table, name) for table in tables)]
    if not common:
        return frames
    rows: list[dict[str, Cell]] = []
    alike: dict[tuple[Cell, ...], list[dict[str, Cell]]] = {}
    for table in tables:
        for at in range(table.length):
            row = {each.name: each.cells[at] for each in table.fields}
            there = alike.setdefault(tuple(row[name] for name in common), [])
            # Every row that it does not contradict takes its cells.
            matching = [each for each in there if _agrees(each, row)]
            for each in matching:
                each.update(row)
            if not matching:
                there.append(row)
                rows.append(row)
    return [Frame([fields[name]._replace(cells=[row.get(name) for row in rows]) for name in order])]


def _has(table: Frame, name: str) -> bool:
    return any(each.name == name for each in table.fields)


def _agrees(row: Mapping[str, Cell], other: Mapping[str, Cell]) -> bool:
    return all(row.get(name) is None or row[name] == cell for name, cell in other.items())


def _organize(frames: list[Frame], options: Options) -> list[Frame]:
    left_out = {name for name, is_out in options.get("excludeByName", {}).items() if is_out}
    places, names = options.get("indexByName", {}), options.get("renameByName", {})
    made = []
    for frame in frames:
        kept = [each for each in frame.fields if not {each.name, each.shown} & left_out]
        kept.sort(key=lambda each: places.get(each.shown, len(frame.fields) + len(places)))
        if kept:
            made.append(
                Frame([each._replace(renamed=names.get(each.shown, each.renamed)) for each in kept])
            )
    return made


def _filter_by_value(frames: list[Frame], options: Options) -> list[Frame]:
    """Without the rows that have a hole in one of these fields."""
    assert (options["type"], options["match"]) == ("exclude", "any"), options
    assert {each["config"]["id"] for each in options["filters"]} == {"isNull"}, options
    made = []
    for frame in frames:
        filtered = [frame.field(each["fieldName"]) for each in options["filters"]]
        holes = [each.cells for each in filtered if each is not None]
        kept = [at for at in range(frame.length) if all(cells[at] is not None for cells in holes)]
        made.append(_rows(frame, kept))
    return made


def _sort_by(frames: list[Frame], options: Options) -> list[Frame]:
    """By the first of the fields only."""
    first = options["sort"][0]
    return [_sorted(frame, first["field"], bool(first.get("desc"))) for frame in frames]


def _sorted(frame: Frame, by: str, falling: bool) -> Frame:
    field = frame.field(by)
    if field is None:
        return frame

    def compared(one: int, other: int) -> int:
        a, b = field.cells[one], field.cells[other]
        if field.kind == "string":
            # Empty ones come last; letters count, and whether they are capital ones does not.
            a, b = (not a, str(a or "").casefold()), (not b, str(b or "").casefold())
        elif a is None or b is None:
            # No number is neither less nor more than any other.
            return 0
        return int(a > b) - int(a < b)

    order = sorted(range(frame.length), key=functools.cmp_to_key(compared), reverse=falling)
    return _rows(frame, order)


def _rows(frame: Frame, wanted: Iterable[int]) -> Frame:
    order = list(wanted)
    return Frame([each._replace(cells=[each.cells[at] for at in order]) for each in frame.fields])


def _group_by(frames: list[Frame], options: Options) -> list[Frame]:
    fields_of: Mapping[str, Options] = options["fields"]
    keys = {name for name, each in fields_of.items() if each["operation"] == "groupby"}
    made = []
    for frame in frames:
        by = [each for each in frame.fields if {each.name, each.shown} & keys]
        if not by:
            continue
        groups: dict[tuple[Cell, ...], list[int]] = {}
        for at in range(frame.length):
            groups.setdefault(tuple(each.cells[at] for each in by), []).append(at)
        fields = [
            each._replace(cells=[each.cells[rows[0]] for rows in groups.values()]) for each in by
        ]
        for each in frame.fields:
            wanted = fields_of.get(each.shown, {})
            if wanted.get("operation") == "aggregate":
                fields += [
                    Field(
                        f"{each.shown} ({how})",
                        "number",
                        [
                            _reduced(how, [each.cells[at] for at in rows])
                            for rows in groups.values()
                        ],
                    )
                    for how in wanted["aggregations"]
                ]
        made.append(Frame(fields))
    return made


def _reduced(how: str, cells: list[Cell]) -> float | None:
    numbers = [each for each in cells if isinstance(each, float) and each == each]
    return _REDUCERS[how](numbers) if numbers else None


def _grouping_to_matrix(frames: list[Frame], options: Options) -> list[Frame]:
    if len(frames) != 1:
        return frames
    (frame,) = frames
    names = options["columnField"], options["rowField"], options["valueField"]
    column, row, value = map(frame.field, names)
    if column is None or row is None or value is None:
        return frames
    # Only this is modelled: "" would be text in a column of numbers.
    assert options["emptyValue"] == "null", options
    keys = zip(column.cells, row.cells, strict=True)
    matrix = dict(zip(keys, value.cells, strict=True))
    rows = list(dict.fromkeys(row.cells))
    return [
        Frame(
            [
                Field(f"{names[1]}\\{names[0]}", row.kind, rows, row.renamed),
                *(
                    Field(str(each), value.kind, [matrix.get((each, at)) for at in rows])
                    for each in dict.fromkeys(column.cells)
                ),
            ]
        )
    ]


def _partition_by_values(frames: list[Frame], options: Options) -> list[Frame]:
    if not frames:
        return frames
    first = frames[0]
    by = [each for each in first.fields if {each.name, each.shown} & set(options["fields"])]
    if not by:
        return [first]
    assert options["naming"]["asLabels"], options
    parts: dict[tuple[Cell, ...], list[int]] = {}
    for at in range(first.length):
        parts.setdefault(tuple(each.cells[at] for each in by), []).append(at)
    kept = first.fields if options.get("keepFields") else [f for f in first.fields if f not in by]
    return [
        Frame(
            [
                each._replace(
                    cells=[each.cells[at] for at in rows],
                    labels={key.name: str(cell) for key, cell in zip(by, values, strict=True)},
                )
                for each in kept
            ]
        )
        for values, rows in parts.items()
    ]


_REDUCERS: dict[str, Callable[[list[float]], float]] = {
    "mean": lambda numbers: sum(numbers) / len(numbers),
    "min": min,
    "max": max,
}
_BY_ID: dict[str, Callable[[list[Frame], Options], list[Frame]]] = {
    "merge": _merge,
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
    x = next((each for each in frames[0].fields if each.kind == "number"), None)
    if x is None:
        raise Refused("no number to draw against")
    across = [each for each in x.cells if isinstance(each, float)]
    # A hole at the end would pass with Grafana, and leave its axis without an end.
    if len(across) < len(x.cells):
        raise Refused(f"points without {x.shown}")
    # Grafana checks fifty points only, and draws a wrong curve if it misses one.
    for one, next_one in pairwise(across):
        if next_one <= one:
            raise Refused(f"{x.shown}: {next_one} after {one}")
    return {
        each.shown: [
            (at, cell)
            for at, cell in zip(across, each.cells, strict=True)
            if isinstance(cell, float)
        ]
        for each in frames[0].fields
        if each.kind == "number" and each is not x
    }


def pairs(frames: list[Frame], x: str, y: str) -> dict[str, Curve]:
    """The points of an XY chart by the labels of their table, in the order of its rows."""
    return {
        " ".join(found.labels.values()): [
            (at, cell)
            for at, cell in zip(across.cells, found.cells, strict=True)
            if isinstance(at, float) and isinstance(cell, float)
        ]
        for frame in frames
        for found in [next(each for each in frame.fields if each.name == y)]
        for across in [next(each for each in frame.fields if each.name == x)]
    }
