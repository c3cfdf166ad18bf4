"""For Accelerate: a tracker that measures each rank, and logs what rank 0 logs."""

from __future__ import annotations

from typing import Any

from accelerate.accelerator import Accelerator
from accelerate.tracking import GeneralTracker

import otel_ddp
from otel_ddp import errors
from otel_ddp.integrations import after, checked
from otel_ddp.run import for_frameworks


class OtelDdpTracker(GeneralTracker):  # type: ignore[misc]
    """`Accelerator(log_with=OtelDdpTracker(group="vision"))`; arguments as of `instrument`.

    Made on every rank, it measures every rank. `accelerator.log` and `accelerator.end_training`
    call trackers on rank 0 only: the runs of other ranks end with their processes.
    """

    name = "otel_ddp"
    requires_logging_directory = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        # Here, since Accelerate starts trackers on rank 0 only.
        self._run = otel_ddp.instrument(**checked(arguments))

    @property
    def tracker(self) -> otel_ddp.Run:
        """The run of this rank."""
        return self._run

    @errors.contained()
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._run.config(values)

    @errors.contained()
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._run.log_beside(_numbers(values), step, **kwargs)

    @errors.contained()
    def finish(self) -> None:
        self._run.finish()


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not isinstance(value, str)}


# -- a program without a line of ours


def log_every_accelerator() -> None:
    """From here on what an Accelerator is given is logged here too, unless ours is a tracker."""
    after(Accelerator, "init_trackers", _configure)
    after(Accelerator, "log", _log)


@errors.contained()
def _configure(
    accelerator: Any, project_name: str, config: dict[str, Any] | None = None, *_: Any, **__: Any
) -> None:
    if config and _is_ours_to_log(accelerator):
        for_frameworks.instrument().config(config)


@errors.contained()
def _log(
    accelerator: Any, values: dict[str, Any], step: int | None = None, *_: Any, **__: Any
) -> None:
    if _is_ours_to_log(accelerator) and (run := otel_ddp.current()) is not None:
        run.log_beside(_numbers(values), step)


def _is_ours_to_log(accelerator: Any) -> bool:
    # Accelerate calls trackers on the first rank only.
    trackers = accelerator.trackers
    return accelerator.is_main_process and not any(
        isinstance(each, OtelDdpTracker) for each in trackers
    )
