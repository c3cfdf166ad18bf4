"""For Lightning: a logger for its values, and a callback that measures each rank."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import otel_ddp
from otel_ddp import errors, integrations
from otel_ddp.integrations import OpenPhase, checked
from otel_ddp.recording import values
from otel_ddp.torch.hooks.called import Called

# Lightning exists as two packages with different classes. Use the one that the program has
# imported.
_PACKAGE = "lightning.pytorch"
if _PACKAGE not in sys.modules and "pytorch_lightning" in sys.modules:
    _PACKAGE = "pytorch_lightning"
_Callback: Any = import_module(f"{_PACKAGE}.callbacks").Callback
_Logger: Any = import_module(f"{_PACKAGE}.loggers.logger").Logger
_on_rank_zero: Any = import_module(f"{_PACKAGE}.utilities.rank_zero").rank_zero_only


class OtelDdpLogger(_Logger):  # type: ignore[misc]
    """`Trainer(logger=OtelDdpLogger(group="mnist"))`; takes the arguments of `instrument`."""

    _instrument: Callable[..., otel_ddp.Run] = staticmethod(otel_ddp.instrument)

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self._arguments = checked(arguments)
        self._run: otel_ddp.Run | None = None

    @property
    def experiment(self) -> otel_ddp.Run:
        """The run of this rank. Lightning reads it on every rank, before the training."""
        # If an exception has ended the run, open a new one, as for the next trial of a sweep.
        if self._run is None or self._run.is_closed:
            self._run = self._instrument(**self._arguments)
        return self._run

    @property
    def name(self) -> str:
        """The group of the run. Lightning also uses it in the directory of checkpoints."""
        return (self._run or self.experiment).group

    @property
    def version(self) -> str:
        """The name of the run, which Lightning calls a version."""
        return (self._run or self.experiment).run

    @errors.contained()
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        _log(metrics, step)

    @errors.contained()
    def log_hyperparams(
        self, params: Mapping[str, Any] | Namespace, *args: Any, **kwargs: Any
    ) -> None:
        self.experiment.config(params)

    @errors.contained()
    def finalize(self, status: str) -> None:
        # After "success" the program may still run a test. So a run that has not failed stays open
        # until its process ends.
        if status == "failed":
            _end_failed(sys.exc_info()[1])

    def __getstate__(self) -> dict[str, Any]:
        # Lightning may send this logger to a rank that it spawns. Leave out the run, as the rank
        # opens its own.
        return {**vars(self), "_run": None}


class OtelDdpCallback(_Callback):  # type: ignore[misc]
    """`Trainer(callbacks=[OtelDdpCallback()])`: steps and phases of each rank, and how it ended.

    Takes the arguments of `instrument`; with an `OtelDdpLogger` it needs none.
    """

    _instrument: Callable[..., otel_ddp.Run] = staticmethod(otel_ddp.instrument)

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self._arguments = checked(arguments)
        self._phase = OpenPhase()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Like `instrument`, this raises for invalid arguments, before the first step."""
        run = self._instrument(_wrapped(trainer, pl_module), **self._arguments)
        run.describe(pl_module)
        self._look_at(trainer, run)

    @errors.contained()
    def _look_at(self, trainer: Any, run: otel_ddp.Run) -> None:
        # Lightning has no event after a checkpoint is written, so the function that writes it is
        # wrapped.
        trainer.save_checkpoint = _as_checkpoint(trainer.save_checkpoint)
        run.config({"trainer": _settings(trainer)})

    @errors.contained()
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # If the training resumes from a checkpoint, Lightning has restored the number of steps by
        # now.
        if (run := otel_ddp.current()) is not None:
            run.resume_from(trainer.global_step)

    @errors.contained()
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._phase.end()
        vars(trainer).pop("save_checkpoint", None)

    @errors.contained()
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        vars(trainer).pop("save_checkpoint", None)
        _end_failed(exception)

    @errors.contained()
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._phase.begin("eval")

    @errors.contained()
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._phase.end()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end


@_on_rank_zero  # type: ignore[untyped-decorator]
def _log(metrics: Mapping[str, Any], step: int | None) -> None:
    """Log values on rank 0 only, as other loggers do.

    Lightning averages some values over the ranks. The others are those of rank 0.
    """
    numbers = {name: value for name, value in metrics.items() if name != "epoch"}
    # A program may log another number as `step`, such as its epoch. So `log_beside` does not treat
    # it as the training step.
    if (run := otel_ddp.current()) is not None:
        run.log_beside(numbers, step, metrics.get("epoch"))


@errors.contained()
def _wrapped(trainer: Any, module: Any) -> Any:
    """The model to instrument, if the strategy has wrapped it, as in DDP; else None.

    If it is not wrapped, Lightning calls `training_step` directly, and `instrument` discovers the
    models that this method calls. None also if `training_step` optimizes manually.
    """
    model = trainer.strategy.model
    return None if model is module or not module.automatic_optimization else model


def _as_checkpoint(save: Any) -> Any:
    @functools.wraps(save)
    def measured(*args: Any, **kwargs: Any) -> Any:
        with otel_ddp.phase("checkpoint"):
            return save(*args, **kwargs)

    return measured


def _settings(trainer: Any) -> dict[str, Any]:
    """The configuration of the Trainer."""
    return {
        "strategy": type(trainer.strategy).__name__,
        "precision": trainer.precision,
        "max_epochs": trainer.max_epochs,
        "max_steps": trainer.max_steps,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "gradient_clip_val": trainer.gradient_clip_val,
    }


def _end_failed(error: BaseException | None) -> None:
    otel_ddp.finish("failed", reason="" if error is None else values.error_line(error))


# -- called by `otel-ddp run`


class _AddedLogger(OtelDdpLogger):
    """The logger that `otel-ddp run` adds to a Trainer."""

    _instrument = staticmethod(integrations.instrument)

    def __init__(self, first: Any) -> None:
        super().__init__()
        self._first = first

    @property
    def version(self) -> str:
        """The version of the program's own logger: the progress bar shows each logger's version."""
        return str(self._first.version)


class _AddedCallback(OtelDdpCallback):
    """The callback that `otel-ddp run` adds to a Trainer."""

    _instrument = staticmethod(integrations.instrument)


def add_to_every_trainer() -> None:
    """Add our callback and logger to each Trainer, unless the program has added one of them."""
    Called(import_module(_PACKAGE).Trainer, "__init__", _add_to_trainer)


@errors.contained()
def _add_to_trainer(trainer: Any, *_: Any, **__: Any) -> None:
    if _is_there(trainer.callbacks) or _is_there(trainer.loggers):
        return
    # Our callback is called first, so that it ends the phase `eval` before another callback saves a
    # checkpoint.
    trainer.callbacks.insert(0, _AddedCallback())
    # The first logger determines the directory of checkpoints. So ours is added only after one of
    # the program. With `fast_dev_run` Lightning drops all loggers, so none is added.
    if trainer.loggers and not trainer.fast_dev_run:
        trainer.loggers.append(_AddedLogger(trainer.loggers[0]))


def _is_there(added: Any) -> bool:
    return any(isinstance(each, OtelDdpCallback | OtelDdpLogger) for each in added)
