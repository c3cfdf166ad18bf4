"""The cumulative totals of a process: counters, steps and their work, time by phase."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial

from otel_ddp import errors
from otel_ddp.journal import layout
from otel_ddp.journal.writer import Gate, JournalWriter
from otel_ddp.recording.steps import Work
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import PHASE_CODE, PHASES, WORK_PHASES, phase_word

_MOST_WARNINGS = 50


class Totals:
    """Writes totals (counters, gauges, histograms) to the journal. Each gets its slot when it is
    first used."""

    def __init__(self, gate: Gate, writer: JournalWriter) -> None:
        self._gate, self._writer = gate, writer
        self._places: dict[tuple[str, ...], int] = {}
        self._warned: set[str] = set()

    def refuse(self, why: str, place: str, text: str, amount: float = 1.0) -> None:
        """Count a value that was not recorded. Logs *text*, but only once for each *place*."""
        self.count(catalog.OTEL_DDP_VALUES_REFUSED, amount, why=why)
        if place not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(place)
            errors.log.warning("%s.", text)

    def count(self, metric: catalog.Metric, amount: float = 1.0, **attributes: str) -> None:
        """Add to a counter, if there is room for it."""
        self._gate.write(lambda: self._writer.add(self._place(metric, attributes), amount), None)

    def place(self, metric: catalog.Metric, **attributes: str) -> int:
        """The journal slot of a total; for a histogram the first of its slots. -1 if there is no
        room."""
        return self._gate.write(partial(self._place, metric, attributes), -1)

    def stamp(self, metric: catalog.Metric, value: float, **attributes: str) -> None:
        """Overwrite a gauge."""
        self._gate.write(lambda: self._writer.set(self._place(metric, attributes), value), None)

    def observe(self, metric: catalog.Metric, value: float) -> None:
        """Add a value to a histogram."""
        self._gate.write(lambda: self._observe(metric, value), None)

    def _observe(self, metric: catalog.Metric, value: float) -> None:
        place = self._place(metric, {})
        if place >= 0:
            self._writer.add(place, value)
            self._writer.add(place + 1 + bisect_left(metric.bounds, value), 1.0)

    def _place(self, metric: catalog.Metric, attributes: Mapping[str, str]) -> int:
        key = (metric.name, *attributes.values())
        place = self._places.get(key)
        if place is None:
            if metric.bounds:
                place = self._writer.histogram(metric.name, metric.bounds)
            else:
                of_name = "name" in attributes
                place = self._writer.counter(metric.name, attributes, of_name)
            self._places[key] = place
        return place


# -- steps and their work

_BOUNDS = catalog.TRAINING_STEP_DURATION.bounds


class StepTotals:
    """Writes the totals of steps, of their work, and of time by phase.

    The number of steps is stored at the end of each step, without a lock, so that it is right even
    if the process hangs or is killed in the next step. The other totals are written at each flush,
    as each journal word that a step touches costs a microsecond.

    A signal handler may close the journal between two stores, so each store looks up `self.store`.
    """

    def __init__(self, totals: Totals, writer: JournalWriter) -> None:
        self._of_process, self._writer = totals, writer
        self.store = writer.totals
        # The number of steps; and its slot in the journal, -1 as long as it has none.
        self.steps, self.place = 0, -1
        self._flops = 0.0

    def step_ended(self) -> None:
        """Count a step."""
        self.steps += 1
        if self.place >= 0:
            self.store[self.place] = self.steps

    def took(self, durations_ns: Sequence[int]) -> None:
        """Add the durations of the last steps."""
        place = self._of_process.place(catalog.TRAINING_STEP_DURATION) if durations_ns else -1
        for took_ns in durations_ns if place >= 0 else ():
            seconds = took_ns / 1e9
            self.store[place] += seconds
            self.store[place + 1 + bisect_left(_BOUNDS, seconds)] += 1.0

    def add_phases(self, by_phase: Mapping[int, float], on_device: Mapping[int, float]) -> None:
        """Add the time in each phase: of the host in nanoseconds, of the device in seconds."""
        for code, nanoseconds in by_phase.items():
            self._add(self._place_of_phase(code, "host"), nanoseconds / 1e9)
        for code, seconds in on_device.items():
            self._add(self._place_of_phase(code, "device"), seconds)

    def _add(self, place: int, amount: float) -> None:
        if place >= 0:
            self.store[place] += amount

    def _place_of_phase(self, code: int, clock: str) -> int:
        word = phase_word(code & PHASE_CODE)
        labels = {"phase": word, "clock": clock}
        if word == "comm_wait":
            labels["sync"] = "buffers" if code & layout.OF_BUFFERS else "gradients"
        return self._of_process.place(catalog.TRAINING_PHASE_TIME, **labels)

    def count(self, work: Work) -> None:
        """Write the number of steps, their work so far, and the time spent in hooks."""
        for metric, value in (
            (catalog.TRAINING_STEPS, self.steps),
            (catalog.TRAINING_SAMPLES, work.samples),
            (catalog.TRAINING_TOKENS, work.tokens),
            (catalog.TRAINING_MICRO_BATCHES, work.micro_batches),
            (catalog.OTEL_DDP_HOOK_TIME, work.hook_ns / 1e9),
        ):
            place = self._of_process.place(metric) if value else -1
            # The training thread may have stored a higher number of steps while another thread
            # flushes. So never store a lower value.
            if place >= 0 and value > self.store[place]:
                self.store[place] = value
        if self.steps:
            self.place = self._of_process.place(catalog.TRAINING_STEPS)
        if work.flops != self._flops:
            place = self._of_process.place(catalog.TRAINING_FLOPS, method=work.flops_method)
            self._add(place, work.flops - self._flops)
            self._flops = work.flops

    def close(self) -> None:
        """From now on, store totals in memory outside of the journal, which is about to close."""
        # That memory has as many slots as the journal, so that all slot numbers stay valid.
        self.store = memoryview(bytearray(8 * len(self._writer.totals))).cast("d")


# -- time by phase

_OTHER, _UNMEASURED = PHASES["other"], PHASES["unmeasured"]
# Unmeasured time is divided into phases as recent measured time was. When the remembered time
# exceeds this, it is halved, so that recent steps count more than old ones.
_REMEMBERED_NS = 60 * 10**9
_OF_STEPS = frozenset(PHASES[word] for word in (*WORK_PHASES, "comm_wait"))
_SHIFT, _VALUE = layout.CODE_SHIFT, layout.WORD_VALUE
# Words from this code on describe calls to process groups. A step may have hundreds of such words,
# so they are skipped first.
_CALLS = layout.STEP_CALL << _SHIFT

# This bit marks phases that a user has named. Their time counts even before the first step, while
# time outside of phases does not.
NAMED = 0x40


class TimeAccount:
    """Adds up time by phase. Not thread-safe."""

    def __init__(self) -> None:
        # The current phase; and the time up to which everything has been added to some phase.
        self._code, self._charged_ns = _OTHER, 0
        self._steps_began = False
        # When the current step began; and whether it was skipped, so its duration does not count.
        self._step_ns, self._skipped = 0, False
        self._by_phase: defaultdict[int, int] = defaultdict(int)
        # Recent time, older time counting less (see _REMEMBERED_NS): by phase in measured steps,
        # and the sum over unmeasured steps.
        self._shares: defaultdict[int, float] = defaultdict(float)
        self._beside_ns = 0.0

    def add(self, words: Sequence[int], now_ns: int) -> list[int]:
        """Add the words of some steps, and the time of the current phase until now.

        Returns the durations of the steps that were not skipped, in nanoseconds.
        """
        # This loop runs for each word on the training thread, so it avoids function calls.
        code, charged_ns, began = self._code, self._charged_ns, self._steps_began
        by_phase, durations = self._by_phase, []
        for word in words:
            if word >= _CALLS:
                continue
            kind = word >> _SHIFT
            if kind < layout.STEPS_BEGAN:
                until_ns = word & _VALUE
                if until_ns > charged_ns:
                    if code != _OTHER or began:
                        by_phase[code] += until_ns - charged_ns
                    charged_ns = until_ns
                code = kind
            elif kind == layout.STEPS_BEGAN:
                # Time outside of phases does not count before the first step, so count from the
                # step's beginning.
                if code == _OTHER:
                    charged_ns = max(charged_ns, word & _VALUE)
                began = True
                self._step_ns = word & _VALUE
            elif kind == layout.STEP_ENDED:
                took_ns, self._step_ns = (word & _VALUE) - self._step_ns, word & _VALUE
                if took_ns > 0 and not self._skipped:
                    durations.append(took_ns)
                self._skipped = False
            elif kind == layout.STEP_SKIPPED:
                self._skipped = True
        if now_ns > charged_ns:
            if code != _OTHER or began:
                by_phase[code] += now_ns - charged_ns
            charged_ns = now_ns
        self._code, self._charged_ns, self._steps_began = code, charged_ns, began
        return durations

    def taken(self) -> Mapping[int, float]:
        """The time in each phase since the last call, in nanoseconds, by phase code.

        The time of unmeasured steps is divided among the phases as in measured steps. So the sum
        over all phases is exact, while each phase is an estimate.
        """
        # Take the sums and reset them in one statement: then a signal handler that interrupts this
        # counts no time twice.
        by_phase, self._by_phase = self._by_phase, defaultdict(int)
        unmeasured_ns = by_phase.pop(_UNMEASURED, 0)
        of_steps = {
            code: ns
            for code, ns in by_phase.items()
            if code != _OTHER | NAMED and code & PHASE_CODE in _OF_STEPS
        }
        if sum(self._shares.values()) > _REMEMBERED_NS:
            self._beside_ns /= 2
            for code in self._shares:
                self._shares[code] /= 2
        for code, ns in of_steps.items():
            self._shares[code] += ns
        self._beside_ns += unmeasured_ns
        measured_ns = sum(self._shares.values())
        if not unmeasured_ns:
            return by_phase
        if not measured_ns:
            return {**by_phase, _OTHER: by_phase[_OTHER] + unmeasured_ns}
        estimated = defaultdict[int, float](float, by_phase)
        for code, share_ns in self._shares.items():
            estimated[code] += unmeasured_ns * share_ns / measured_ns
        return estimated

    @property
    def whole_of_measured(self) -> float:
        """How much longer all recent steps took than the measured ones among them, as a factor."""
        measured_ns = sum(self._shares.values())
        return 1.0 + self._beside_ns / measured_ns if measured_ns else 1.0
