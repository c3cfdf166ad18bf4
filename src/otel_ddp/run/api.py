"""The functions that users call: `instrument`, `init`, `log` and the others."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Collection, Mapping
from importlib import import_module
from typing import Any, Literal, TypeVar, cast

from otel_ddp.identity.identity import Strategy
from otel_ddp.run import current_run
from otel_ddp.run.opening import current_task
from otel_ddp.run.run import Origin, Run, silent

T = TypeVar("T")


# Arguments of `instrument` that concern measuring, not the run.
_NOT_OF_RUN = ("model", "optimizer", "step_optimizer", "scaler", "flops_per_sample", "mirror")
# Arguments of `init` that `instrument` does not have: the launcher gives their values.
_NOT_OF_INSTRUMENT = dict.fromkeys(("node", "global_rank", "local_rank", "world_size"))


def init(
    strategy: Strategy | None = None,
    *,
    group: str | None = None,
    run: str | None = None,
    job_type: str | None = None,
    project: str | None = None,
    name: str | None = None,
    description: str | None = None,
    tags: str | Collection[str] | None = None,
    node: str | None = None,
    global_rank: int | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
    config: Any = None,
    best: Mapping[str, Literal["min", "max", "none"]] | None = None,
) -> Run:
    """Open the run of this process, or return the one that is open.

    For an argument that is not passed, an environment variable (such as OTEL_DDP_GROUP) or the
    launcher gives the value. *best* maps names of logged values to the direction in which they
    improve: `best={"wer": "min", "speed": "max", "aux_loss": "none"}`.
    """
    return _open(locals())


def _open(arguments: dict[str, Any]) -> Run:
    with current_run.opening():
        task = current_task()
        opened = current()
        if opened is not None:
            if not opened.is_over(task, arguments):
                opened.opened_again(arguments)
                return opened
            opened.close("finished", "")
        inherited: Run | None = current_run.inherited()
        if inherited is None or task is not None or arguments["run"] not in (None, inherited.run):
            opened = Run(Origin(arguments, task=task))
        else:
            opened = inherited.with_arguments(arguments)
        current_run.start(opened)
        return opened


def instrument(
    model: Any = None,
    strategy: Strategy | None = None,
    *,
    group: str | None = None,
    run: str | None = None,
    job_type: str | None = None,
    project: str | None = None,
    name: str | None = None,
    description: str | None = None,
    tags: str | Collection[str] | None = None,
    config: Any = None,
    best: Mapping[str, Literal["min", "max", "none"]] | None = None,
    optimizer: Any = None,
    step_optimizer: Any = None,
    scaler: Any = None,
    flops_per_sample: float | None = None,
    mirror: bool = False,
) -> Run:
    """Open a run as `init` does, and measure the steps of a model.

    As `init` does, it takes *group* to *tags*, *config* and *best*. Without a *model*, as with a
    trainer that builds it, models are found at their first call. Pass *optimizer* if it has other
    parameters than the model's, such as copies in float32. If there are several optimizers,
    *step_optimizer* is the one that ends a training step. With *scaler* (a gradient scaler),
    skipped steps are counted. *flops_per_sample* is the FLOPs of forward and backward per sample.
    With *mirror*, what the program logs to W&B, SwanLab, MLflow and TensorBoard is recorded too.
    """
    arguments = {name: value for name, value in locals().items() if name not in _NOT_OF_RUN}
    opened = _open({**_NOT_OF_INSTRUMENT, **arguments})
    if model is not None:
        opened.describe(model)
    opened.watch(
        model,
        optimizer=optimizer,
        step_optimizer=step_optimizer,
        scaler=scaler,
        flops_per_sample=flops_per_sample,
    )
    if mirror:
        # Import this only here, by name: integrations import this module, which would be a cycle.
        import_module("otel_ddp.integrations.trackers").mirror(opened)
    return opened


def uninstrument() -> None:
    """Take the hooks off every model; the run stays open."""
    opened = current()
    if opened is not None:
        opened.unwatch()


def data(loader: T) -> T:
    """Measure how long training waits for batches: `for batch in otel_ddp.data(loader)`."""
    if "torch" not in sys.modules:
        return loader
    from otel_ddp.torch.hooks.data import timed

    return cast("T", timed(loader))


def current() -> Run | None:
    """The run of this process, if one is open."""
    opened: Run | None = current_run.current()
    return opened


_NO_RUN = silent()


def _run() -> Run:
    """The run of this process, or one that records nothing."""
    found: Run = current_run.current() or current_run.inherited() or _NO_RUN
    return found


def log(
    metrics: Mapping[str, Any],
    *,
    step: int | None = None,
    epoch: float | None = None,
    split: str | None = None,
) -> None:
    """Record numbers in the current run, if there is one."""
    _run().log(metrics, step=step, epoch=epoch, split=split)


def phase(name: str, *, expect_s: float | None = None) -> contextlib.AbstractContextManager[None]:
    """Mark what this process does, in the current run if there is one."""
    return _run().phase(name, expect_s=expect_s)


def span(name: str, /, **attributes: Any) -> contextlib.AbstractContextManager[None]:
    """Record how long something takes, in the current run if there is one."""
    return _run().span(name, **attributes)


def event(name: str, /, **attributes: Any) -> None:
    """Record that something happened, in the current run if there is one."""
    _run().event(name, **attributes)


def alert(title: str, text: str = "", level: Literal["info", "warn", "error"] = "info") -> None:
    """Send people a message, in the current run if there is one."""
    _run().alert(title, text, level)


def artifact(
    path: str | os.PathLike[str],
    *,
    name: str | None = None,
    type: str = "file",
    direction: Literal["output", "input"] = "output",
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Record a file or directory as an output or input of the current run, if there is one."""
    _run().artifact(path, name=name, type=type, direction=direction, metadata=metadata)


def config(mapping: T) -> T:
    """Record the configuration in the current run, if there is one; returns *mapping* unchanged."""
    return _run().config(mapping)


def finish(state: str = "finished", *, reason: str = "") -> None:
    """End the current run if there is one."""
    if (run := current()) is not None:
        run.finish(state, reason=reason)
