"""Callbacks, loggers and trackers for frameworks: a module for each, which imports it.

Here is what they share: their arguments, phases between two events of a framework, and how they
hear a program without a line of ours. `trackers` hears W&B and others, and imports none of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import otel_ddp


def checked(arguments: dict[str, Any]) -> dict[str, Any]:
    """These arguments; a TypeError if `instrument` does not take them beside its model."""
    inspect.signature(otel_ddp.instrument).bind(None, **arguments)
    return arguments


def after(owner: Any, name: str, act: Callable[..., Any]) -> None:
    """From here on call *act* after each call of a function, with the same arguments."""
    function = getattr(owner, name)

    # As it is called: the defaults of what is left out differ between versions.
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        act(*args, **kwargs)
        return result

    setattr(owner, name, called)


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
