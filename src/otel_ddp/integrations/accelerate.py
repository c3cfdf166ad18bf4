"""For Accelerate: a tracker that measures each rank, and logs what rank 0 logs."""

from __future__ import annotations

from typing import Any

from accelerate.tracking import GeneralTracker

import otel_ddp
from otel_ddp import errors
from otel_ddp.integrations import checked


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
        numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
        self._run.log(numbers, step=step, **kwargs)

    @errors.contained()
    def finish(self) -> None:
        self._run.finish()
