"""Asks a Prometheus, or what speaks its API, directly or through Grafana."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from otel_ddp.cli.drill.http_api import HttpApi, NoAnswer
from otel_ddp.cli.text import mappings

# Names of recorded series have colons, and no other names have.
_RECORDED = re.compile(r"(?<![\w:])[a-zA-Z_]\w*:[\w:]+")
# Texts, and ranges with a step: up[5m:1m].
_NO_NAMES = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|\[[^]]*\]")


class Rule(NamedTuple):
    """One rule that Prometheus has loaded."""

    name: str
    query: str
    error: str
    """Of its last evaluation; empty if that went well."""


class Prometheus:
    """Instant queries, queries over time, and the rules that are loaded."""

    def __init__(self, api: HttpApi) -> None:
        self.api = api

    def query(self, promql: str) -> list[dict[str, str]]:
        """The labels of each series that an instant query brings."""
        return _labels(self.api.post("/api/v1/query", {"query": promql}))

    def query_range(
        self, promql: str, start_s: float, end_s: float, step_s: float
    ) -> list[dict[str, str]]:
        """The labels of each series that a query brings over time."""
        times = {"start": f"{start_s:.3f}", "end": f"{end_s:.3f}", "step": f"{step_s:g}"}
        return _labels(self.api.post("/api/v1/query_range", {"query": promql, **times}))

    def rules(self) -> list[Rule]:
        """All rules and alerts."""
        groups = mappings(_data(self.api.get("/api/v1/rules")).get("groups"))
        return [
            Rule(
                str(each.get("name", "")),
                str(each.get("query", "")),
                str(each.get("lastError") or "") if each.get("health") == "err" else "",
            )
            for group in groups
            for each in mappings(group.get("rules"))
        ]


def _data(answer: Any) -> Mapping[str, Any]:
    data = answer.get("data") if isinstance(answer, Mapping) else None
    if not isinstance(data, Mapping):
        raise NoAnswer("the answer is not that of a Prometheus: is another server there?")
    return data


def _labels(answer: Any) -> list[dict[str, str]]:
    result = mappings(_data(answer).get("result"))
    return [dict(each.get("metric") or {}) for each in result]


def recorded_names(promql: str) -> set[str]:
    """The series of other rules that a query asks for."""
    return set(_RECORDED.findall(_NO_NAMES.sub(" ", promql)))


def missing_rules(queries: Iterable[str], rules: Sequence[Rule]) -> set[str]:
    """What these queries need, directly or through other rules, and no rule records."""
    by_name: dict[str, list[str]] = {}
    for rule in rules:
        by_name.setdefault(rule.name, []).append(rule.query)
    return set(_unrecorded(queries, by_name))


def _unrecorded(queries: Iterable[str], by_name: Mapping[str, Sequence[str]]) -> Iterator[str]:
    seen: set[str] = set()
    open_queries = list(queries)
    while open_queries:
        for name in recorded_names(open_queries.pop()) - seen:
            seen.add(name)
            if name in by_name:
                open_queries += by_name[name]
            else:
                yield name
