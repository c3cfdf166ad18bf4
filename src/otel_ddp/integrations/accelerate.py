"""For Accelerate: records what a program passes to its Accelerator."""

from __future__ import annotations

import functools
from typing import Any

from accelerate.accelerator import Accelerator

import otel_ddp
from otel_ddp import errors, integrations
from otel_ddp.torch.hooks.called import Called


# Once: `otel-ddp run` calls it before the program may.
@functools.cache
def autolog() -> None:
    """Record the configuration and values of each Accelerator, with or without a tracker."""
    Called(Accelerator, "init_trackers", _configure)
    Called(Accelerator, "log", _log)


@errors.contained()
def _configure(
    accelerator: Any, project_name: str, config: dict[str, Any] | None = None, *_: Any, **__: Any
) -> None:
    # Accelerate itself calls trackers on the first rank only.
    if config and accelerator.is_main_process:
        integrations.instrument().config(config)


@errors.contained()
def _log(
    accelerator: Any, values: dict[str, Any], step: int | None = None, *_: Any, **__: Any
) -> None:
    if accelerator.is_main_process and (run := otel_ddp.current()) is not None:
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        run.log_beside(numbers, step)
