"""Reads the queries of the boards from their files, as Grafana does: for tests and other tools.

Variables chain in the order in which they are given: the values of those before it are put into the
query of each. `$name` and `${name}` mean
- a variable that takes several: one value escaped for a pattern, several as (a|b), All as its
  `all_value`, which is not escaped;
- any other one: its value, with backslashes escaped. `${name:text}` is in titles only.
What Grafana knows by itself: `$__range`, `$__rate_interval`, `$__interval`, and that in `_ms`.
`$1` is left alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

FOLDER = Path(__file__).parents[2] / "deploy" / "grafana" / "dashboards"


class Option(NamedTuple):
    """An option of a variable."""

    text: str
    value: str


class Variable(NamedTuple):
    """One variable of a board."""

    name: str
    kind: Literal["datasource", "query", "custom", "textbox"]
    query: str
    """label_values(selector, label), label_names(metric) or query_result(expression)"""
    regex: str
    """/.../: options are the first group of its matches."""
    multi: bool
    all_value: str
    """The value of All; empty without it."""
    options: tuple[Option, ...]
    """Static options."""
    default: tuple[str, ...]
    """`$__all` is All. Without a default, or if it is no option, the first option is selected."""


class Question(NamedTuple):
    """One query to Prometheus."""

    panel_id: int
    panel: str
    ref: str
    expr: str
    instant: bool
    """At the end of the time range, not over it."""
    max_points: int
    """The most steps in the time range."""
    shortest_step_s: float
    """0 if not set."""


class Mark(NamedTuple):
    """One annotation query over the time range."""

    name: str
    expr: str


class Board(NamedTuple):
    """One dashboard."""

    title: str
    variables: tuple[Variable, ...]
    questions: tuple[Question, ...]
    log_questions: tuple[str, ...]
    """The queries to Loki."""
    marks: tuple[Mark, ...]


def boards() -> Iterator[Board]:
    """All boards, by the names of their files."""
    for path in sorted(FOLDER.glob("*.json")):
        yield board(json.loads(path.read_text(encoding="utf-8")))


def board(definition: dict[str, Any]) -> Board:
    return Board(
        definition["title"],
        tuple(map(_variable, definition["templating"]["list"])),
        tuple(_questions(definition)),
        tuple(_log_questions(definition)),
        tuple(Mark(each["name"], each["expr"]) for each in definition["annotations"]["list"]),
    )


def panels(definition: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Each panel with its row, open or collapsed."""
    row: dict[str, Any] = {}
    for panel in definition["panels"]:
        if panel["type"] != "row":
            yield row, panel
            continue
        row = panel
        for within in row["panels"]:
            yield row, within


def _questions(definition: dict[str, Any]) -> Iterator[Question]:
    for _, panel in panels(definition):
        for target in panel.get("targets", []):
            if target["datasource"]["type"] == "prometheus":
                yield Question(
                    panel["id"],
                    panel["title"],
                    target["refId"],
                    target["expr"],
                    target["instant"],
                    # About Grafana's default for a panel of full width.
                    panel.get("maxDataPoints", 1000),
                    float(panel.get("interval", "0m").removesuffix("m")) * 60,
                )


def _log_questions(definition: dict[str, Any]) -> Iterator[str]:
    for _, panel in panels(definition):
        for target in panel.get("targets", []):
            if target["datasource"]["type"] == "loki":
                yield str(target["expr"])


def _variable(definition: dict[str, Any]) -> Variable:
    query = definition["query"]
    chosen = definition.get("current", {}).get("value", [])
    return Variable(
        definition["name"],
        definition["type"],
        query["query"] if isinstance(query, dict) else query,
        definition.get("regex", ""),
        bool(definition.get("multi")),
        definition.get("allValue", ""),
        tuple(
            Option(each["text"], each["value"])
            for each in definition.get("options") or definition.get("staticOptions") or []
        ),
        tuple(chosen) if isinstance(chosen, list) else (chosen,),
    )
