"""Checks the types of values from untrusted JSON: a value of another type becomes a default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_WHOLE = 2**63


def text(found: Any) -> str:
    """The value if it is a text, else an empty text."""
    return found if isinstance(found, str) else ""


def whole(found: Any) -> int | None:
    """The value if it is an integer that fits into 64 bits, else None."""
    sane = isinstance(found, int) and not isinstance(found, bool) and abs(found) < _WHOLE
    return found if sane else None


def number(found: Any, least: float = -1e18, most: float = 1e18) -> float | None:
    """The value if it is a number within these bounds, so neither NaN nor infinite; else None."""
    sane = isinstance(found, (int, float)) and not isinstance(found, bool)
    return float(found) if sane and least <= found <= most else None


def mapping(found: Any) -> Mapping[str, Any]:
    """The value if it is a mapping, else an empty mapping."""
    return found if isinstance(found, Mapping) else {}


def list_of(kind: type[T], found: Any) -> list[T]:
    """Those items of a list that have this type; empty if *found* is no list."""
    return [each for each in found if isinstance(each, kind)] if isinstance(found, list) else []
