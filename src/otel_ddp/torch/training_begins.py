"""Learns when a process announces that it trains, so that a program needs no line of ours.

Two things announce it: the making of an optimizer, and a backward. Only then does a hook on all
modules look for a model that trains (`discovery`). So a program that never trains has these
functions of torch's replaced, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer

from otel_ddp import errors
from otel_ddp.torch import models
from otel_ddp.torch.hooks.called import Called, backwards

_replaced: list[Called] = []


def wait(begin: Callable[[], None]) -> None:
    """Call *begin* once, right before the first call of a model that trains."""
    stop()
    _replaced.append(Called(Optimizer, "__init__", lambda *_, **__: _announced(begin)))
    _replaced.extend(backwards(lambda *_, **__: _announced(begin)))


def stop() -> None:
    """Wait no longer, and leave torch as it was found."""
    for each in _replaced:
        each.take_off()
    _replaced.clear()


@errors.contained()
def _announced(begin: Callable[[], None]) -> None:
    stop()
    if not models.is_new_enough():
        return
    # Imported here: a process that never trains has no need of it.
    from otel_ddp.torch import discovery

    discovery.look(begin)
