"""Names of metrics for queries: the catalogue's and those that rules record, no others."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Kind

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules"

_METRICS = {metric.name: metric for metric in catalog.METRICS}
_PARTS = ("bucket", "sum", "count")


class UnknownName(LookupError):
    """Nobody emits or records this."""


def metric(name: str, *selectors: str, part: str = "") -> str:
    """A selector by OpenTelemetry name; of a histogram, its bucket, sum or count."""
    known = _METRICS.get(name)
    if known is None:
        raise UnknownName(f"the catalogue has no {name!r}")
    if (known.kind is Kind.HISTOGRAM) != (part in _PARTS):
        raise UnknownName(
            f"{name!r} is a {known.kind.value}: part={part!r} is not one of its series"
        )
    return _selected(f"{known.prometheus}_{part}" if part else known.prometheus, selectors)


def attributes(name: str) -> tuple[str, ...]:
    """The labels of a metric beside those that identify its owner."""
    return tuple(catalog.prometheus_label(each) for each in _METRICS[name].attributes)


def recorded(name: str, *selectors: str) -> str:
    """A selector of what the rules in deploy/prometheus/rules record."""
    if name not in _recorded():
        raise UnknownName(f"no rule records {name!r}")
    return _selected(name, selectors)


@cache
def _recorded() -> frozenset[str]:
    # One `record:` a line: a parser of YAML is not needed to find them.
    found = (
        re.findall(r"^\s*- record: *(\S+)", path.read_text(), re.M) for path in RULES.glob("*.yml")
    )
    return frozenset(name for names in found for name in names)


def _selected(name: str, selectors: tuple[str, ...]) -> str:
    inner = ",".join(selector for selector in selectors if selector)
    return f"{name}{{{inner}}}" if inner else name


def mentioned(expressions: list[str]) -> tuple[list[str], bool]:
    """The catalogue's and recorded names in these, and whether any is recorded."""
    words = dict.fromkeys(
        word for each in expressions for word in re.findall(r"[a-zA-Z_][\w:]*", each)
    )
    series = {
        name
        for known in _METRICS.values()
        for name in (known.prometheus, *(f"{known.prometheus}_{part}" for part in _PARTS))
    }
    names = [word for word in words if word in series or word in _recorded()]
    return names, any(name in _recorded() for name in names)
