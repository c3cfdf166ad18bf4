"""instrument: the one line that a user adds."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TypeVar, cast

from otel_ddp.errors import ConfigError
from otel_ddp.run import Run
from otel_ddp.session import current, init
from otel_ddp.strategies import UNSAID, Strategy

T = TypeVar("T")


def instrument(
    model: Any,
    strategy: Strategy = UNSAID,
    *,
    group: str | None = None,
    run: str | None = None,
    job_type: str | None = None,
    project: str | None = None,
    name: str | None = None,
    description: str | None = None,
    config: Any = None,
    parallel: Mapping[str, Any] | None = None,
    optimizer: Any = None,
    step_optimizer: Any = None,
    scaler: Any = None,
    flops_per_sample: float | None = None,
) -> Run:
    """Open the run of this process if none is open, measure the steps of a model, return the run.

    *parallel* is what a trainer's configuration says of ranks; a live process group knows better.
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
        config=config,
        **_ranks(parallel),
    )
    opened.describe(model)
    opened.watch(
        model,
        optimizer=optimizer,
        step_optimizer=step_optimizer,
        scaler=scaler,
        flops_per_sample=flops_per_sample,
    )
    return opened


def _ranks(parallel: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a trainer's configuration says of ranks, in our words."""
    if parallel is None:
        return {}
    if not isinstance(parallel, Mapping):
        raise ConfigError(
            "parallel must be a mapping such as {'world_size': 8, 'rank': 0}, "
            f"got {type(parallel).__name__}."
        )
    names = {"rank": "global_rank", "local_rank": "local_rank", "world_size": "world_size"}
    return {ours: parallel[name] for name, ours in names.items() if parallel.get(name) is not None}


def uninstrument() -> None:
    """Take the hooks off every model; the run stays open."""
    opened = current()
    if opened is not None:
        opened.unwatch()


def data(loader: T) -> T:
    """Measure the waits for batches of any iterable: `for batch in otel_ddp.data(loader)`."""
    if "torch" not in sys.modules:
        return loader
    from otel_ddp.torch.data_hooks import Timed

    return cast("T", Timed(loader))
