"""Follows the last steps of a journal: their durations, and the rank's own time in them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from otel_ddp.agent.reading.steps import Step, StepStream
from otel_ddp.diagnosis.medians import lower_median
from otel_ddp.journal.reader import JournalReader, Steps
from otel_ddp.words import PHASE_CODE, PHASES

KEPT = 256
_WAIT = PHASES["comm_wait"]


class StepWork(NamedTuple):
    """One step of one rank."""

    number: int
    took_ns: int
    work_ns: int
    """Without waits for other ranks."""


class RecentSteps:
    """One a journal, beside the agent: it takes nothing away that an agent has yet to read."""

    def __init__(self, reader: JournalReader) -> None:
        self._reader = reader
        self._stream = StepStream(reader.created_ns)
        self.steps: deque[StepWork] = deque(maxlen=KEPT)
        self.last: Step | None = None
        """The last whole step, with its parts."""
        reader.rewind()

    def poll(self) -> None:
        """Read what is new."""
        for record in self._reader.read():
            if isinstance(record, Steps) and not record.on_device:
                for step in self._stream.feed(record):
                    self._add(step)

    def _add(self, step: Step) -> None:
        if step.number is None or step.took_ns <= 0:
            return
        spans = (*zip(step.parts.codes, step.parts.spans_ns, strict=True), *step.rest)
        waited_ns = sum(each_ns for code, each_ns in spans if code & PHASE_CODE == _WAIT)
        self.steps.append(StepWork(step.number, step.took_ns, step.took_ns - waited_ns))
        self.last = step

    def work_ns(self, last: int = 50) -> float | None:
        """The median of the rank's own time in its last steps; None if there are none."""
        found = [each.work_ns for each in list(self.steps)[-last:]]
        return lower_median(found) if found else None
