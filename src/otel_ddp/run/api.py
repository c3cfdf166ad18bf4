"""The functions of the module: `instrument`, the one line that a user adds, and the others."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, cast

from otel_ddp.identity.strategy import UNSAID, Strategy
from otel_ddp.run import current_run
from otel_ddp.run.run import Run, own_task

T = TypeVar("T")


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
    parallel: Mapping[str, Any] | None = None,
) -> Run:
    """Open the run of this process, or return the one that is open.

    Every argument has a variable (OTEL_DDP_GROUP, ...) and a default from the launcher.
    """
    with current_run.opening():
        arguments = {
            "strategy": strategy,
            "group": group,
            "run": run,
            "job_type": job_type,
            "project": project,
            "name": name,
            "description": description,
            "tags": tags,
            "node": node,
            "global_rank": global_rank,
            "local_rank": local_rank,
            "world_size": world_size,
            "config": config,
            "parallel": parallel,
        }
        task = own_task()
        opened = current()
        if opened is not None:
            if not opened.is_over(task, arguments):
                opened.opened_again(arguments)
                return opened
            opened.close("finished", "")
        inherited = cast("Run | None", current_run.inherited())
        if inherited is None or task is not None or run not in (None, inherited.run):
            opened = Run(arguments, task=task)
        else:
            opened = inherited.told(arguments)
        current_run.start(opened)
        return opened


def instrument(
    model: Any = None,
    strategy: Strategy = UNSAID,
    *,
    group: str | None = None,
    run: str | None = None,
    job_type: str | None = None,
    project: str | None = None,
    name: str | None = None,
    description: str | None = None,
    tags: str | Collection[str] | None = None,
    config: Any = None,
    parallel: Mapping[str, Any] | None = None,
    optimizer: Any = None,
    step_optimizer: Any = None,
    scaler: Any = None,
    flops_per_sample: float | None = None,
) -> Run:
    """Open the run of this process if none is open, measure the steps of a model, return the run.

    Without a *model*, as where a trainer builds its own, the models that train are found when they
    are called for the first time.
    *parallel* is what a trainer's configuration says of `rank`, `local_rank` and `world_size`; the
    launcher and a live process group know better.
    *optimizer* is one whose parameters are not the model's own (copies in float32, say), and
    *step_optimizer* the one of several whose step ends a training step. *scaler* tells steps that
    it left out. *flops_per_sample*: forward and backward, where you know better than we can count.
    """
    opened = init(
        None if strategy is UNSAID else strategy,
        group=group,
        run=run,
        job_type=job_type,
        project=project,
        name=name,
        description=description,
        tags=tags,
        config=config,
        parallel=parallel,
    )
    if model is not None:
        opened.describe(model)
    opened.watch(
        model,
        optimizer=optimizer,
        step_optimizer=step_optimizer,
        scaler=scaler,
        flops_per_sample=flops_per_sample,
    )
    return opened


def uninstrument() -> None:
    """Take the hooks off every model; the run stays open."""
    opened = current()
    if opened is not None:
        opened.unwatch()


def data(loader: T) -> T:
    """Measure the waits for batches of any iterable: `for batch in otel_ddp.data(loader)`."""
    if "torch" not in sys.modules:
        return loader
    from otel_ddp.torch.hooks.data import timed

    return cast("T", timed(loader))


def current() -> Run | None:
    """The run of this process, if one is open."""
    return cast("Run | None", current_run.current())


def _current_or_inherited() -> Run | None:
    return cast("Run | None", current_run.current() or current_run.inherited())


def log(
    metrics: Mapping[str, Any],
    *,
    step: int | None = None,
    epoch: float | None = None,
    split: str | None = None,
) -> None:
    """Record numbers in the current run; nothing happens where there is none."""
    if (run := _current_or_inherited()) is not None:
        run.log(metrics, step=step, epoch=epoch, split=split)


def phase(name: str, *, expect_s: float | None = None) -> contextlib.AbstractContextManager[None]:
    """Say what this process does, in the current run if there is one."""
    run = _current_or_inherited()
    return contextlib.nullcontext() if run is None else run.phase(name, expect_s=expect_s)


def span(name: str, /, **attributes: Any) -> contextlib.AbstractContextManager[None]:
    """Record how long something takes, in the current run if there is one."""
    run = _current_or_inherited()
    return contextlib.nullcontext() if run is None else run.span(name, **attributes)


def event(name: str, /, **attributes: Any) -> None:
    """Record that something happened, in the current run if there is one."""
    if (run := _current_or_inherited()) is not None:
        run.event(name, **attributes)


def config(mapping: T) -> T:
    """Record the configuration in the current run if there is one; returned unchanged."""
    run = _current_or_inherited()
    return mapping if run is None else run.config(mapping)


def finish(state: str = "finished", *, reason: str = "") -> None:
    """End the current run if there is one."""
    if (run := current()) is not None:
        run.finish(state, reason=reason)
