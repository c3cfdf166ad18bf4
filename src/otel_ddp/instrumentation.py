"""instrument: the one line that a user adds."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any, TypeVar, cast

from otel_ddp.run import Run
from otel_ddp.session import current, init
from otel_ddp.strategies import UNSAID, Strategy

T = TypeVar("T")


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
    from otel_ddp.torch.data_hooks import timed

    return cast("T", timed(loader))
