"""Reads values from untrusted JSON: of the expected type, or an empty default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_WHOLE = 2**63


def text(found: Any) -> str:
    """A text, or an empty one."""
    return found if isinstance(found, str) else ""


def whole(found: Any) -> int | None:
    """An integer of 64 bits, or None."""
    sane = isinstance(found, int) and not isinstance(found, bool) and abs(found) < _WHOLE
    return found if sane else None


def number(found: Any, least: float = -1e18, most: float = 1e18) -> float | None:
    """A number within these bounds, which exclude NaN and infinity; or None."""
    sane = isinstance(found, (int, float)) and not isinstance(found, bool)
    return float(found) if sane and least <= found <= most else None


def mapping(found: Any) -> Mapping[str, Any]:
    """A mapping, or an empty one."""
    return found if isinstance(found, Mapping) else {}


def list_of(kind: type[T], found: Any) -> list[T]:
    """The items of this type in a list; empty if *found* is no list."""
    return [each for each in found if isinstance(each, kind)] if isinstance(found, list) else []
