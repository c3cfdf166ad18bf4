"""Checks what an integration passes on to `instrument`, on the line where the user wrote it."""

from __future__ import annotations

import inspect
from typing import Any

import otel_ddp


def checked(arguments: dict[str, Any]) -> dict[str, Any]:
    """These arguments; a TypeError if `instrument` does not take them beside its model."""
    inspect.signature(otel_ddp.instrument).bind(None, **arguments)
    return arguments
