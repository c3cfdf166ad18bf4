"""For Accelerate: what a program gives its Accelerator is logged here too."""

from __future__ import annotations

import functools
from typing import Any

from accelerate.accelerator import Accelerator

import otel_ddp
from otel_ddp import errors
from otel_ddp.integrations import after
from otel_ddp.run import for_frameworks


# Once: `otel-ddp run` calls it before a line of the program does.
@functools.cache
def autolog() -> None:
    """From here on what an Accelerator is given is logged here too, with or without a tracker."""
    after(Accelerator, "init_trackers", _configure)
    after(Accelerator, "log", _log)


@errors.contained()
def _configure(
    accelerator: Any, project_name: str, config: dict[str, Any] | None = None, *_: Any, **__: Any
) -> None:
    # Accelerate itself calls trackers on the first rank only.
    if config and accelerator.is_main_process:
        for_frameworks.instrument().config(config)


@errors.contained()
def _log(
    accelerator: Any, values: dict[str, Any], step: int | None = None, *_: Any, **__: Any
) -> None:
    if accelerator.is_main_process and (run := otel_ddp.current()) is not None:
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        run.log_beside(numbers, step)
