"""For Ignite: a logger whose handlers log outputs, metrics and parameters of optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ignite.engine import Events
from ignite.handlers.base_logger import (
    BaseLogger,
    BaseOptimizerParamsHandler,
    BaseOutputHandler,
)

import otel_ddp
from otel_ddp import errors
from otel_ddp.integrations import OpenPhase, checked
from otel_ddp.recording import values

_SPLITS = ("train", "val", "test")


class OtelDdpLogger(BaseLogger):  # type: ignore[misc]
    """`OtelDdpLogger(trainer, group="vision")`; arguments as of `instrument`.

    Made on every rank, it measures every rank; rank 0 logs. The values of any engine have the
    iteration and the epoch of *trainer*, unless their handler has a `global_step_transform`.
    """

    def __init__(self, trainer: Any, model: Any = None, **arguments: Any) -> None:
        self.trainer = trainer
        self.run = otel_ddp.instrument(model, **checked(arguments))
        self._evaluators: list[Any] = []

    def attach(self, engine: Any, *args: Any, **kwargs: Any) -> Any:
        """As with other loggers of Ignite. An engine that is not the trainer evaluates."""
        if engine is not self.trainer and engine not in self._evaluators:
            self._evaluators.append(engine)
            phase = OpenPhase()
            engine.add_event_handler(Events.STARTED, lambda: phase.begin("eval"))
            engine.add_event_handler(Events.COMPLETED, lambda: phase.end())
            # An engine that raises or is interrupted is not completed. Ignite takes an error that
            # has a handler for handled, so there is none: the phase ends when training goes on.
            goes_on = Events.GET_BATCH_STARTED | Events.COMPLETED
            self.trainer.add_event_handler(goes_on, lambda: phase.end())
        return super().attach(engine, *args, **kwargs)

    def log(self, found: Mapping[str, Any], tag: str | None, step: int | None = None) -> None:
        """Record these values on rank 0. A *tag* that names a split is one, others are a prefix."""
        if self.run.identity.global_rank:
            return
        state = self.trainer.state
        split = values.split_of("", tag) if tag else None
        if split not in _SPLITS:
            split, found = None, {f"{tag}/{k}" if tag else k: v for k, v in found.items()}
        at = state.iteration if step is None else step
        self.run.log(found, step=at, epoch=state.epoch, split=split)

    def close(self) -> None:
        """End the run."""
        self.run.finish()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.run.__exit__(kind, error, trace)

    def _create_output_handler(self, *args: Any, **kwargs: Any) -> OutputHandler:
        return OutputHandler(*args, **kwargs)

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> OptimizerParamsHandler:
        return OptimizerParamsHandler(*args, **kwargs)


class OutputHandler(BaseOutputHandler):  # type: ignore[misc]
    """Logs the output, the metrics or attributes of the state of an engine."""

    def __init__(
        self,
        tag: str,
        metric_names: str | list[str] | None = None,
        output_transform: Any = None,
        global_step_transform: Any = None,
        state_attributes: list[str] | None = None,
    ) -> None:
        super().__init__(
            tag, metric_names, output_transform, global_step_transform, state_attributes
        )
        self._step_of = global_step_transform

    @errors.contained()
    def __call__(self, engine: Any, logger: OtelDdpLogger, event_name: Any) -> None:
        step = None if self._step_of is None else self._step_of(engine, event_name)
        logger.log(dict(_numbers("", self._found(engine.state))), self.tag, step)

    def _found(self, state: Any) -> dict[str, Any]:
        # Not by Ignite's own method, which waits for each tensor of a device.
        names = state.metrics if self.metric_names == "all" else self.metric_names or ()
        found = {name: state.metrics[name] for name in names if name in state.metrics}
        if self.output_transform is not None:
            output = self.output_transform(state.output)
            found.update(output if isinstance(output, Mapping) else {"output": output})
        return found | {name: getattr(state, name) for name in self.state_attributes or ()}


class OptimizerParamsHandler(BaseOptimizerParamsHandler):  # type: ignore[misc]
    """Logs a parameter of each group of an optimizer."""

    @errors.contained()
    def __call__(self, engine: Any, logger: OtelDdpLogger, event_name: Any) -> None:
        groups = enumerate(self.optimizer.param_groups)
        name = self.param_name
        logger.log({f"{name}/group_{i}": group[name] for i, group in groups}, self.tag)


def _numbers(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The numbers inside, named as Ignite names them."""
    inner: Any = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, Sequence) or getattr(value, "ndim", 0) == 1:
        inner = enumerate(value)
    elif value is not None:
        yield prefix, value
    if not isinstance(value, str):
        for name, each in inner:
            yield from _numbers(f"{prefix}/{name}" if prefix else str(name), each)
