"""For Ray Train: ends the run of a worker as its training function ends."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import otel_ddp
from otel_ddp import errors
from otel_ddp.torch.hooks.called import Called


def end_with_the_function() -> None:
    """End the run of a worker when its training function ends: as failed, if it raises.

    Called by `otel-ddp run`. Ray later ends the worker by a signal. If the run were still open
    then, this would look like a death.
    """
    # In each worker, Ray calls the training function inside this context manager.
    context = import_module("ray.train.torch").TorchConfig().train_func_context
    Called(context, "__exit__", _end, before=True)


@errors.contained()
def _end(_: Any, kind: Any, error: Any, trace: Any) -> None:
    if (run := otel_ddp.current()) is not None:
        run.__exit__(kind, error, trace)
