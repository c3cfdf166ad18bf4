"""A phase that one event of a framework begins and another one ends."""

from __future__ import annotations

from contextlib import ExitStack

import otel_ddp


class OpenPhase:
    """At most one phase at a time. Framework code between the events may raise: no end is owed."""

    def __init__(self) -> None:
        self.name = ""
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
