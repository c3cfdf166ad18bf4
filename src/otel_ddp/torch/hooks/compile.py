"""Times the compilations of torch.compile."""

from __future__ import annotations

import sys
import threading
from typing import Any

from otel_ddp import containment
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.steps.stepper import Stepper

_stepper: Stepper | None = None
_handler: Any = None


def attach(stepper: Stepper) -> None:
    """Hook into Dynamo, if it is imported already: importing it takes a second."""
    global _stepper, _handler
    _stepper = stepper
    # Private. In a torch without it, compiling counts to the phase that it was done in.
    found: Any = getattr(sys.modules.get("torch._dynamo.callback"), "callback_handler", None)
    if _handler is None and all(hasattr(found, name) for name in ("start_callbacks", "clear")):
        found.start_callbacks.append(_began)
        found.end_callbacks.append(_ended)
        _handler = found


def detach() -> None:
    """Take the hooks off."""
    global _stepper, _handler
    _stepper = None
    if _handler is not None:
        for callbacks, ours in (
            (_handler.start_callbacks, _began),
            (_handler.end_callbacks, _ended),
        ):
            if ours in callbacks:
                callbacks.remove(ours)
        _handler = None


def _began(*args: Any) -> None:
    stepper = _stepper
    if stepper is None or not stepper.alive:
        return
    try:
        stepper.on_compile()
        stepper.compile_began(threading.get_ident())
        model_hooks.watch_compiled_wrapper(stepper)
    except containment.ANY_ERROR:
        stepper.failed("before compiling")


def _ended(*args: Any) -> None:
    stepper = _stepper
    if stepper is None or not stepper.alive:
        return
    try:
        stepper.compile_ended()
    except containment.ANY_ERROR:
        stepper.failed("after compiling")
