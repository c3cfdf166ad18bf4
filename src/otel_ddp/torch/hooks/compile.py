"""Times the compilations of torch.compile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.hooks import optimizer as optimizer_hooks
from otel_ddp.torch.steps.stepper import Stepper

_stepper: Stepper | None = None


def attach(stepper: Stepper) -> None:
    """Time compilations, if Dynamo is imported already: importing it takes a second."""
    global _stepper
    _stepper = stepper
    listen(began, _ended)


def detach() -> None:
    """Time none any more."""
    global _stepper
    _stepper = None
    ignore(began, _ended)


def listen(before: Callable[..., None], after: Callable[..., None]) -> None:
    """Call these before and after each compilation."""
    found = _of_dynamo()
    if found is not None and before not in found.start_callbacks:
        found.start_callbacks.append(before)
        found.end_callbacks.append(after)


def ignore(*listeners: Callable[..., None]) -> None:
    """Call these no more."""
    found = _of_dynamo()
    if found is not None:
        # New lists: Dynamo may be going through the old ones at this moment.
        found.start_callbacks = [each for each in found.start_callbacks if each not in listeners]
        found.end_callbacks = [each for each in found.end_callbacks if each not in listeners]


def _of_dynamo() -> Any:
    """Dynamo's lists of callbacks; None if it is not imported."""
    # Private. In a torch without it, compiling counts to the phase that it was done in.
    found: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    return found if all(hasattr(found, name) for name in ("start_callbacks", "clear")) else None


def began(*args: Any) -> None:
    """A compilation begins. Dynamo calls this, and whoever has it attached in the middle of one."""
    stepper = _stepper
    if stepper is not None and stepper.alive:
        stepper.act("before compiling", _begin, stepper)


def _begin(stepper: Stepper) -> None:
    stepper.search.compiling()
    stepper.compile_began(threading.get_ident())
    model_hooks.compiling(stepper)
    # What is compiled may be an optimizer's step. It is valid for these hooks, which then stay.
    optimizer_hooks.switch(True)


def _ended(*args: Any) -> None:
    stepper = _stepper
    if stepper is not None and stepper.alive:
        stepper.act("after compiling", stepper.compile_ended)
