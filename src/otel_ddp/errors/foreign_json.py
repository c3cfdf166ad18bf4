"""Parses JSON that any program may have written: in journals, histories, reports and answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

# Ours has ten levels at most. Code that goes through them calls itself once or twice a level.
_DEEPEST = 64


def parse(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """The content; raises ValueError for what is damaged or nested too deeply."""
    try:
        content = json.loads(text, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    level = [content]
    for _ in range(_DEEPEST + 1):
        level = [
            child
            for each in level
            if isinstance(each, (dict, list))
            for child in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return content
    raise ValueError("it is nested too deeply")
