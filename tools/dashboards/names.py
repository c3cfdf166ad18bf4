"""Names of metrics for queries: only those of the catalogue and of recording rules."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Kind

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "rules"

_PARTS = ("bucket", "sum", "count")


class UnknownName(LookupError):
    """No metric or rule has this name."""


def metric(name: str, *selectors: str, part: str = "") -> str:
    """A selector by OpenTelemetry name. *part*: bucket, sum or count of a histogram."""
    known = catalog.BY_NAME.get(name)
    if known is None:
        raise UnknownName(f"the catalogue has no {name!r}")
    if (known.kind is Kind.HISTOGRAM) != (part in _PARTS):
        raise UnknownName(
            f"{name!r} is a {known.kind.value}: part={part!r} is not one of its series"
        )
    return _selected(f"{known.prometheus}_{part}" if part else known.prometheus, selectors)


def attributes(name: str) -> tuple[str, ...]:
    """The labels of a metric's own attributes."""
    return tuple(catalog.prometheus_label(each) for each in catalog.BY_NAME[name].attributes)


def recorded(name: str, *selectors: str) -> str:
    """A selector by the name of a recording rule."""
    if name not in _recorded():
        raise UnknownName(f"no rule records {name!r}")
    return _selected(name, selectors)


@cache
def _recorded() -> frozenset[str]:
    # Each `record:` is on a line of its own.
    found = (
        re.findall(r"^\s*- record: *(\S+)", path.read_text(), re.M) for path in RULES.glob("*.yml")
    )
    return frozenset(name for names in found for name in names)


def _selected(name: str, selectors: tuple[str, ...]) -> str:
    inner = ",".join(selector for selector in selectors if selector)
    return f"{name}{{{inner}}}" if inner else name


def mentioned(expressions: list[str]) -> tuple[list[str], bool]:
    """The names of metrics and rules in these, and whether any is of a rule."""
    words = dict.fromkeys(
        word for each in expressions for word in re.findall(r"[a-zA-Z_][\w:]*", each)
    )
    series = {
        name
        for known in catalog.BY_NAME.values()
        for name in (known.prometheus, *(f"{known.prometheus}_{part}" for part in _PARTS))
    }
    names = [word for word in words if word in series or word in _recorded()]
    return names, any(name in _recorded() for name in names)
