"""Totals that are right at the end of each step: the steps, their work and how long they took."""

from __future__ import annotations

from bisect import bisect_left

from otel_ddp import catalog
from otel_ddp.recording.locked_journal import LockedJournal

_COUNTED = (
    *(catalog.TRAINING_STEPS, catalog.TRAINING_SAMPLES, catalog.TRAINING_TOKENS),
    catalog.TRAINING_MICRO_BATCHES,
)
_BOUNDS = catalog.TRAINING_STEP_DURATION.bounds
# A total takes its place in the journal when it first counts something.
_NO_PLACE_YET = -2


class StepTotals:
    """Written as each step ends, with plain stores: no lock, and nothing that waits.

    So a process that hangs in the next step, or is killed there, has counted this one.

    A signal's handler may close the journal between two stores: each looks anew where it goes.
    """

    def __init__(self, recorder: LockedJournal) -> None:
        self._recorder = recorder
        self._totals = recorder.writer.totals
        self._places = [_NO_PLACE_YET] * len(_COUNTED)
        self._durations = _NO_PLACE_YET
        self._steps = 0
        self._flops = 0.0
        self._flops_places: dict[str, int] = {}

    def step_ended(self, took_ns: int) -> None:
        """Counts a step that was not skipped. Its work is for `count`."""
        self._steps += 1
        if took_ns <= 0:
            return
        place = self._durations
        if place == _NO_PLACE_YET:
            place = self._durations = self._recorder.place(catalog.TRAINING_STEP_DURATION)
        if place >= 0:
            seconds = took_ns / 1e9
            bucket = place + 1 + bisect_left(_BOUNDS, seconds)
            self._totals[place] += seconds
            self._totals[bucket] += 1.0

    def count(self, work: tuple[float, float, float], flops: float, method: str) -> None:
        """Writes the work so far: samples, tokens, micro batches and FLOPs."""
        for at, value in enumerate((self._steps, *work)):
            place = self._places[at]
            if place == _NO_PLACE_YET and value:
                place = self._places[at] = self._recorder.place(_COUNTED[at])
            # A thread that flushes may have counted before the step that has ended meanwhile.
            if place >= 0 and value > self._totals[place]:
                self._totals[place] = value
        if flops != self._flops:
            if method not in self._flops_places:
                place = self._recorder.place(catalog.TRAINING_FLOPS, method=method)
                self._flops_places[method] = place
            place = self._flops_places[method]
            if place >= 0:
                self._totals[place] += flops - self._flops
            self._flops = flops

    def close(self) -> None:
        """The journal is about to close: writes that come later go nowhere."""
        # The writer's, as it may be closed already.
        self._totals = memoryview(bytearray(8 * len(self._recorder.writer.totals))).cast("d")
