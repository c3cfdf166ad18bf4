"""For Ray Train: records what workers report, and how the training function ended."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import otel_ddp
from otel_ddp import errors
from otel_ddp.torch.hooks.called import Called

# By its name: while the import of `ray.train` is finishing, it is not an attribute of `ray` yet.
_train: Any = import_module("ray.train")
_report = _train.report


def report(metrics: Any, *args: Any, **kwargs: Any) -> Any:
    """Like `ray.train.report`; also logs the metrics in the run of this worker."""
    _log(metrics)
    checkpoint = args[0] if args else kwargs.get("checkpoint")
    saves = contextlib.nullcontext() if checkpoint is None else otel_ddp.phase("checkpoint")
    with saves:
        # Arguments stay as they are: with Ray's V1 workers a checkpoint must be a keyword.
        return _report(metrics, *args, **kwargs)


@errors.contained()
def _log(metrics: Mapping[str, Any]) -> None:
    # On each worker: the hooks also read a loss on each, and a name must have one meaning.
    numbers = {k: v for k, v in metrics.items() if not isinstance(v, str | Mapping | list | tuple)}
    otel_ddp.log(numbers, epoch=numbers.pop("epoch", None))


# -- called by `otel-ddp run`


def log_every_report() -> None:
    """Replace `ray.train.report` by ours.

    It keeps Ray's name, by which it is pickled: a worker without otel_ddp uses Ray's own.
    """

    @functools.wraps(_report)
    def reported(*args: Any, **kwargs: Any) -> Any:
        return report(*args, **kwargs)

    _train.report = reported


def end_with_the_function() -> None:
    """End a worker's run with its training function, with its exception if it raised one."""
    # Ray calls the function inside this context, in each worker.
    context = import_module("ray.train.torch").TorchConfig().train_func_context
    Called(context, "__exit__", _end, before=True)


@errors.contained()
def _end(_: Any, kind: Any, error: Any, trace: Any) -> None:
    if (run := otel_ddp.current()) is not None:
        run.__exit__(kind, error, trace)
