"""For Accelerate: a tracker that measures each rank, and logs what rank 0 logs."""

from __future__ import annotations

import functools
from typing import Any

from accelerate import Accelerator
from accelerate.tracking import GeneralTracker

import otel_ddp
from otel_ddp import errors
from otel_ddp.integrations import checked


class OtelDdpTracker(GeneralTracker):  # type: ignore[misc]
    """`Accelerator(log_with=OtelDdpTracker(group="vision"))`; arguments as of `instrument`.

    Made on every rank, it measures every rank. `accelerator.log` calls trackers on rank 0 only;
    `accelerator.end_training` ends the run on every rank.
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


def _end_runs_of_all_ranks() -> None:
    """From here on `end_training` ends the run of each rank that has made a tracker of ours.

    Accelerate itself tells the trackers of rank 0 alone.
    """
    end = Accelerator.end_training

    @functools.wraps(end)
    def end_and_finish(self: Any) -> None:
        # First: it destroys the process group, which may have to tell the run's name yet.
        _finish(self)
        end(self)

    Accelerator.end_training = end_and_finish


@errors.contained()
def _finish(accelerator: Any) -> None:
    for each in accelerator.log_with:
        if isinstance(each, OtelDdpTracker):
            each.finish()


_end_runs_of_all_ranks()
