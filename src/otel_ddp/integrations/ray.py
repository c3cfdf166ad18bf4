"""For Ray Train: what its workers report, and how the function that trains ended."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import otel_ddp
from otel_ddp import errors

# By its name: while Python is about to end its import, it is no attribute of `ray`.
_train: Any = import_module("ray.train")
_report = _train.report


def report(metrics: Any, *args: Any, **kwargs: Any) -> Any:
    """As `ray.train.report`; the run of this worker logs the metrics as well."""
    _log(metrics)
    checkpoint = args[0] if args else kwargs.get("checkpoint")
    saves = contextlib.nullcontext() if checkpoint is None else otel_ddp.phase("checkpoint")
    with saves:
        # As it is called: where Ray's first workers are on, a checkpoint has to be named.
        return _report(metrics, *args, **kwargs)


@errors.contained()
def _log(metrics: Mapping[str, Any]) -> None:
    # On each worker: the hooks read a loss on each as well, and one name has one meaning.
    numbers = {k: v for k, v in metrics.items() if not isinstance(v, str | Mapping | list | tuple)}
    otel_ddp.log(numbers, epoch=numbers.pop("epoch", None))


# -- a program without a line of ours


def log_every_report() -> None:
    """From here on `ray.train.report` is ours.

    It has the name of Ray's. So it is pickled by that name, and is Ray's own in a worker without
    otel_ddp.
    """

    @functools.wraps(_report)
    def reported(*args: Any, **kwargs: Any) -> Any:
        return report(*args, **kwargs)

    _train.report = reported


def end_with_the_function() -> None:
    """From here on the run of a worker ends with its function, or with what that has raised."""
    # In this the function is called, in each worker.
    context = import_module("ray.train.torch").TorchConfig().train_func_context
    leave = context.__exit__

    def leave_and_end(self: Any, kind: Any, error: Any, trace: Any) -> Any:
        _end(kind, error, trace)
        return leave(self, kind, error, trace)

    context.__exit__ = leave_and_end


@errors.contained()
def _end(kind: Any, error: Any, trace: Any) -> None:
    if (run := otel_ddp.current()) is not None:
        run.__exit__(kind, error, trace)
