"""instrument: the one line that a user adds."""

from __future__ import annotations

import sys
from typing import Any, TypeVar, cast

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
    step_optimizer: Any = None,
) -> Run:
    """Open the run of this process if none is open, say what model it trains, return the run."""
    opened = init(
        None if strategy is UNSAID else strategy,
        group=group,
        run=run,
        job_type=job_type,
        project=project,
        name=name,
        description=description,
        config=config,
    )
    opened.describe(model)
    opened.watch(model, step_optimizer)
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
    from otel_ddp.torch.data_hooks import Timed

    return cast("T", Timed(loader))
