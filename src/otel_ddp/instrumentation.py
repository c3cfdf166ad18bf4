"""instrument: the one line that a user adds."""

from __future__ import annotations

from typing import Any

from otel_ddp.run import Run
from otel_ddp.session import init
from otel_ddp.strategies import UNSAID, Strategy


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
    return opened
