"""What Grafana asks of Prometheus when a board is opened: its variables, put into its queries."""

from __future__ import annotations

import math
import re
import urllib.parse
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from tools.dashboards.queries import Board, Question, Variable

from stack.servers import Prometheus, Sample, Series

ALL = "$__all"
# What a step may be, and below which length it is chosen.
_STEPS_S = (
    *((1.5, 1.0), (3.5, 2.0), (7.5, 5.0), (12.5, 10.0), (17.5, 15.0), (25.0, 20.0), (45.0, 30.0)),
    *((90.0, 60.0), (210.0, 120.0), (450.0, 300.0), (750.0, 600.0), (1050.0, 900.0)),
    *((1500.0, 1200.0), (2700.0, 1800.0), (5400.0, 3600.0), (9000.0, 7200.0), (16200.0, 10800.0)),
    *((32400.0, 21600.0), (86400.0, 43200.0)),
)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?::\w+)?\}|\$([A-Za-z_]\w*)")
_SPECIAL = re.compile(r"[\\^$*+?.()|\[\]{}]")


class Page(NamedTuple):
    """What somebody looks at: whose numbers, and of which time."""

    prometheus: Prometheus
    start_s: float
    end_s: float
    interval_s: float = 5.0
    """How often a series has a point; the data source has it as `timeInterval`."""

    @property
    def span_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def times(self) -> dict[str, str]:
        return {"start": repr(self.start_s), "end": repr(self.end_s)}


def step_s(page: Page, question: Question) -> float:
    """How far apart the points of an answer are."""
    wanted_s = page.span_s / question.max_points
    shortest_s = question.shortest_step_s or page.interval_s
    if wanted_s <= shortest_s:
        return shortest_s
    return next(step for below, step in _STEPS_S if wanted_s < below)


def put_in(text: str, values: Mapping[str, str], page: Page, *, every_s: float) -> str:
    """A query as it leaves Grafana; a variable that nobody knows is an error here."""
    known = {
        **values,
        "__range": f"{round(page.span_s)}s",
        "__interval": f"{every_s:g}s",
        "__interval_ms": f"{every_s * 1000:g}",
        "__rate_interval": f"{max(every_s + page.interval_s, 4 * page.interval_s):g}s",
    }
    return _VARIABLE.sub(lambda found: known[found[1] or found[2]], text)


def expression(question: Question, values: Mapping[str, str], page: Page) -> str:
    """The query of one target of a panel."""
    every_s = step_s(page, question)
    return put_in(question.expr, values, page, every_s=every_s)


def as_written(variable: Variable, *chosen: str) -> str:
    """The value of a variable, or several, as it stands within a string of a query."""
    if not variable.multi:
        (value,) = chosen
        return value.replace("\\", "\\\\")
    if chosen == (ALL,):
        return variable.all_value
    # Escaped for the pattern first; each backslash is two within a string.
    escaped = [_SPECIAL.sub(r"\\\g<0>", each).replace("\\", "\\\\") for each in chosen]
    return escaped[0] if len(escaped) == 1 else f"({'|'.join(escaped)})"


def options(variable: Variable, values: Mapping[str, str], page: Page) -> list[str]:
    """What there is to choose from; sorted only where the query itself sorts."""
    own = [each.value for each in variable.options]
    if variable.kind != "query":
        return own
    found = _brought(put_in(variable.query, values, page, every_s=page.interval_s), page)
    if variable.regex:
        pattern = re.compile(variable.regex.strip("/").replace("(?<", "(?P<"))
        matches = [match for each in found if (match := pattern.search(each))]
        found = [match.groupdict().get("value", match[1]) for match in matches]
    return [*own, *found]


# What a page shows stays as it is.
@cache
def _brought(query: str, page: Page) -> list[str]:
    """What the query of a variable brings."""
    kind, _, of = query.removesuffix(")").partition("(")
    if kind == "query_result":
        return [_shown(each) for each in page.prometheus.query(of, at_s=page.end_s)]
    selector, _, label = of.rpartition(",") if kind == "label_values" else (of, "", "")
    asked = urllib.parse.urlencode({"match[]": selector, **page.times})
    path = f"label/{label.strip()}/values" if label else "labels"
    return [str(each) for each in page.prometheus.api(f"{path}?{asked}")]


def _shown(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
    return f"{sample.name}{{{labels}}} {sample.value} {sample.time_s}"


def opened(board: Board, page: Page, **wanted: Sequence[str]) -> dict[str, str]:
    """A value for each variable: the wanted ones, or what the board opens with."""
    values: dict[str, str] = {}
    for variable in board.variables:
        if variable.kind == "datasource":
            continue
        if variable.name in wanted:
            chosen = wanted[variable.name]
        elif variable.kind == "textbox":
            chosen = (variable.query,)
        elif variable.default == (ALL,):
            chosen = (ALL,)
        else:
            there = options(variable, values, page)
            assert there, f"{board.title}: nothing to choose for {variable.name}"
            chosen = (next((each for each in variable.default if each in there), there[0]),)
        values[variable.name] = as_written(variable, *chosen)
    return values


def answer(
    question: Question, values: Mapping[str, str], page: Page
) -> list[Series] | list[Sample]:
    """What one target of a panel brings; a query that is wrong raises."""
    expr = expression(question, values, page)
    if question.instant:
        return page.prometheus.query(expr, at_s=page.end_s)
    return over_time(question, expr, page)


def over_time(question: Question, expr: str, page: Page) -> list[Series]:
    """Over the page's time, from and to whole steps: else each reload would show other points."""
    every_s = step_s(page, question)
    start_s, end_s = (math.floor(at / every_s) * every_s for at in (page.start_s, page.end_s))
    return page.prometheus.query_range(expr, start_s=start_s, end_s=end_s, step_s=every_s)
