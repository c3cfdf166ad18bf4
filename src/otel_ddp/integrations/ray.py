"""For Ray Train: ends the run of a worker as its training function ends."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import otel_ddp
from otel_ddp import errors
from otel_ddp.torch.hooks.called import Called


def end_with_the_function() -> None:
    """End a worker's run when its training function ends; an exception makes the run fail.

    Called by `otel-ddp run`. Later Ray ends the worker by a signal, which would look like a death.
    """
    # Ray calls the function inside this context, in each worker.
    context = import_module("ray.train.torch").TorchConfig().train_func_context
    Called(context, "__exit__", _end, before=True)


@errors.contained()
def _end(_: Any, kind: Any, error: Any, trace: Any) -> None:
    if (run := otel_ddp.current()) is not None:
        run.__exit__(kind, error, trace)
