"""Opens the run of a program that has no line of ours, when it begins to train."""

from __future__ import annotations

from otel_ddp.torch import training_begins


def wait_for_training() -> None:
    """Measure this process from the first step on, unless the program asks for that by itself."""
    training_begins.wait(_measure)


def stop() -> None:
    """Wait no longer."""
    training_begins.stop()


def _measure() -> None:
    from otel_ddp.identity import pool_tasks
    from otel_ddp.run import opening, unasked

    if opening.in_data_worker():
        # A copy of a process that is about to train; a data set may call models, too.
        return
    unasked.instrument()
    if pool_tasks.in_worker():
        # A pool's worker may train again: its next task is the next run.
        training_begins.wait_for_next(_measure)
