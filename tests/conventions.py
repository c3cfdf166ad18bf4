"""What OpenTelemetry's package of semantic conventions has: metrics, attributes, their values."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from enum import EnumMeta
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from otel_ddp.vocabulary.catalog import Kind


class Convention(NamedTuple):
    """A metric as the conventions have it."""

    kind: Kind
    unit: str


class _Meter:
    """Stands where the package's functions expect an SDK's meter, and notes what they ask for."""

    def __init__(self) -> None:
        self.asked: dict[str, Convention] = {}

    def __getattr__(self, function: str) -> Any:
        kinds = {
            "up_down_counter": Kind.UPDOWN,
            "counter": Kind.COUNTER,
            "histogram": Kind.HISTOGRAM,
            "gauge": Kind.GAUGE,
        }
        kind = next(kind for word, kind in kinds.items() if function.endswith(word))

        def create(name: str, *, unit: str = "", **_: Any) -> None:
            self.asked[name] = Convention(kind, unit)

        return create


def _modules(kind: str) -> Iterator[ModuleType]:
    for part in (kind, f"_incubating.{kind}"):
        folder = importlib.import_module(f"opentelemetry.semconv.{part}")
        for each in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}."):
            yield importlib.import_module(each.name)


@cache
def metrics() -> dict[str, Convention]:
    """Every metric by its name."""
    meter = _Meter()
    for module in _modules("metrics"):
        for name, create in vars(module).items():
            if name.startswith("create_"):
                # Those that are read when asked for take their callbacks as well.
                create(*[meter, None][: create.__code__.co_argcount])
    return meter.asked


@cache
def attributes() -> set[str]:
    """Every attribute."""
    return {
        value
        for module in _modules("attributes")
        for name, value in vars(module).items()
        if name.isupper() and isinstance(value, str)
    }


@cache
def values() -> dict[str, set[str]]:
    """The values of each attribute that has well-known ones alone."""
    found = {}
    for module in _modules("attributes"):
        for name, enum in vars(module).items():
            if isinstance(enum, EnumMeta) and name.endswith("Values"):
                found[name.removesuffix("Values").lower()] = {each.value for each in enum}
    return {
        attribute: found[word]
        for attribute in attributes()
        # "_OTHER" stands for whatever else there is.
        if "_OTHER" not in found.get(word := re.sub("[._]", "", attribute), {"_OTHER"})
    }


def namespaces() -> set[str]:
    """The first parts of all names: they belong to OpenTelemetry."""
    return {name.partition(".")[0] for name in (*metrics(), *attributes()) if "." in name}
