"""Asks what a board asks, with its variables set to the runs of a drill."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from otel_ddp.cli.drill.prometheus import Prometheus
from otel_ddp.cli.text import mappings

# As a data source has it that says nothing of an interval.
_STEP_S = 15.0
_RATE_INTERVAL_S = 4 * _STEP_S
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::\w+)?\}|\$([A-Za-z_]\w*)")

_OF_A_RUN = re.compile(r"\$\{?(run|node|newest)\b")


class Query(NamedTuple):
    """One query of one panel."""

    panel: str
    expr: str
    instant: bool

    @property
    def asks_for_a_run(self) -> bool:
        """Whether it brings nothing unless there are data of a run, or of its node."""
        return bool(_OF_A_RUN.search(self.expr)) and "vector(" not in self.expr


class Board:
    """One board, as Grafana has it or as this version brings it."""

    def __init__(self, definition: Mapping[str, Any]) -> None:
        self.title = str(definition.get("title", ""))
        self.uid = str(definition.get("uid", ""))
        listed = definition.get("templating")
        variables = listed.get("list") if isinstance(listed, Mapping) else None
        self._variables = mappings(variables)
        self.queries = list(_queries(definition))

    @property
    def source(self) -> str:
        """The data source that it was saved with; empty if it takes the default one."""
        for each in self._variables:
            if each.get("type") == "datasource" and each.get("query") == "prometheus":
                return _current(each)
        return ""

    def values(self, runs: Sequence[str], group: str, node: str) -> Iterator[dict[str, str]]:
        """Values of all variables: once for all runs, or for each where a board shows one."""
        several = any(each.get("name") == "run" and each.get("multi") for each in self._variables)
        for run in [f"({'|'.join(runs)})"] if several else runs:
            chosen = {"group": group, "run": run, "newest": runs[0], "node": node}
            yield {
                name: chosen[name] if name in chosen else _opened(each)
                for each in self._variables
                if (name := str(each.get("name", "")))
            }


def _queries(definition: Mapping[str, Any]) -> Iterator[Query]:
    for panel in mappings(definition.get("panels")):
        # A closed row holds its panels; others follow theirs.
        yield from _queries(panel)
        for target in mappings(panel.get("targets")):
            # What is asked of Loki has an expression too.
            of_prometheus = target.get("datasource", {}).get("type") == "prometheus"
            if of_prometheus and isinstance(expr := target.get("expr"), str):
                yield Query(str(panel.get("title", "")), expr, bool(target.get("instant")))


def _current(variable: Mapping[str, Any]) -> str:
    current = variable.get("current")
    value = current.get("value") if isinstance(current, Mapping) else None
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, str) else ""


def _opened(variable: Mapping[str, Any]) -> str:
    """What a variable is when the board is opened; all values where it takes several."""
    if variable.get("multi"):
        return str(variable.get("allValue") or ".*")
    if variable.get("type") == "textbox":
        return str(variable.get("query", ""))
    options = mappings(variable.get("options"))
    return _current(variable) or next((str(each.get("value", "")) for each in options), "")


def put_in(expr: str, values: Mapping[str, str], span_s: float) -> str:
    """A query as it leaves Grafana."""
    known = {
        **values,
        "__range": f"{max(math.ceil(span_s), 1)}s",
        "__interval": f"{_STEP_S:g}s",
        "__interval_ms": f"{_STEP_S * 1000:g}",
        "__rate_interval": f"{_RATE_INTERVAL_S:g}s",
    }
    return _VARIABLE.sub(lambda found: known.get(found[1] or found[2], found[0]), expr)


def answers(
    query: Query, prometheus: Prometheus, values: Mapping[str, str], start_s: float, end_s: float
) -> bool:
    """Whether a query brings something; raises NoAnswer if it is refused."""
    expr = put_in(query.expr, values, end_s - start_s)
    if query.instant:
        return bool(prometheus.query(expr))
    return bool(prometheus.query_range(expr, start_s, end_s, _STEP_S))
