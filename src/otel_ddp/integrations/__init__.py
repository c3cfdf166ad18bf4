"""Callbacks, loggers and trackers for frameworks: a module for each, which imports it.

Here is what they share: their arguments, and phases between two events of a framework. `trackers`
hears W&B and others, and imports none of them.
"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from typing import Any

import otel_ddp


def checked(arguments: dict[str, Any]) -> dict[str, Any]:
    """These arguments; a TypeError if `instrument` does not take them beside its model."""
    inspect.signature(otel_ddp.instrument).bind(None, **arguments)
    return arguments


class OpenPhase:
    """At most one phase at a time. Framework code between the events may raise: no end is owed."""

    def __init__(self) -> None:
        self.name: str = ""
        self._stack = ExitStack()

    def begin(self, name: str) -> None:
        """End the open phase, if any, and begin this one."""
        self.end()
        self._stack.enter_context(otel_ddp.phase(name))
        self.name = name

    def end(self) -> None:
        """End the open phase, if any."""
        self.name = ""
        self._stack.close()
