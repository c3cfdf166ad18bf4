"""What an agent has read of a rank, as its history takes it."""

from __future__ import annotations

from typing import Any

from otel_ddp.agent.history.kept_run import Batch
from otel_ddp.agent.history.run_time import ProcessTime
from otel_ddp.agent.reading.process import News
from otel_ddp.diagnosis.steps import Parts, Step
from otel_ddp.journal.layout import EVENT
from otel_ddp.journal.parser import Document, Name, Scalars

RUN = ("g", "r")
S, MS = 10**9, 10**6
NAMES = {1: Name("loss", "train")}


def batch(first: int, count: int, *, journal: str = "j0", rank: str = "0", **more: Any) -> Batch:
    """So many steps of 10 ms, each with a value and a line; *more*: other news."""
    numbers = range(first, first + count)
    steps = [
        Step(
            n,
            n * 10 * MS,
            (n + 1) * 10 * MS,
            Parts(n * 10 * MS, bytes([2, 4]), (7 * MS, 3 * MS)),
            *((), 0.0, False, 0),
        )
        for n in numbers
        if n
    ]
    news = News(
        scalars=[Scalars((n + 1) * S, n, None, (1,), (n / 3,), 100 * n + 1) for n in numbers],
        steps=steps,
        device_steps=[],
        estimated=steps,
        device_estimated=[],
        events=[
            Document(EVENT, {"time": n, "name": "", "body": f"line {n}", "step": n}, 100 * n + 2)
            for n in numbers
        ],
        spans=[],
        overwritten=[],
    )
    until = 100 * (first + count)
    process = ProcessTime(rank, 1, 1, 0, "running", journal=journal)
    return Batch(RUN, process, until, NAMES, news._replace(**more))
