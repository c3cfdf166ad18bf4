"""Where the time of the steps goes: adds up what each phase of each step took."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from otel_ddp import catalog
from otel_ddp.journal import layout
from otel_ddp.recording.locked_journal import Amount

_CODES = catalog.PHASES
_OTHER = _CODES["other"]
_COMM_WAIT = _CODES["comm_wait"]
_SHIFT, _VALUE = layout.CODE_SHIFT, layout.WORD_VALUE

# Marks the time in a phase of the user's own. Time outside of any phase counts for nothing before
# the first step.
NAMED = 0x40


class Work(NamedTuple):
    """The work of all steps so far."""

    samples: float
    tokens: float
    micro_batches: float
    gc_s: float
    hook_s: float
    flops: float


# The metrics of the work, in its order; the last one has the method as an attribute.
_WORK = (
    *(catalog.TRAINING_SAMPLES, catalog.TRAINING_TOKENS, catalog.TRAINING_MICRO_BATCHES),
    *(catalog.TRAINING_GC_TIME, catalog.OTEL_DDP_HOOK_TIME),
)


def _labels(code: int, clock: str) -> tuple[tuple[str, str], ...]:
    word = next(word for word, number in _CODES.items() if number == code & layout.PHASE_CODE)
    found: tuple[tuple[str, str], ...] = (("phase", word), ("clock", clock))
    if word == "comm_wait":
        found += (("sync", "buffers" if code & layout.OF_BUFFERS else "gradients"),)
    return found


_ALL_CODES = (*_CODES.values(), _OTHER | NAMED, _COMM_WAIT | layout.OF_BUFFERS)
_LABELS = {code: _labels(code, "host") for code in _ALL_CODES}
_DEVICE_LABELS = {code: _labels(code, "device") for code in _ALL_CODES}


class TimeAccount:
    """Adds up time by phase, steps and their durations. One thread at a time."""

    def __init__(self) -> None:
        # The phase up to which time is charged, and when it was.
        self._code, self._charged_ns = _OTHER, 0
        self._steps_began = False
        self._step_began_ns = 0
        self._by_phase: dict[int, int] = {}
        self._durations_s: list[float] = []
        self._steps = self._skipped = 0
        self._reported = Work(0, 0, 0, 0, 0, 0)

    def add(self, words: Sequence[int], now_ns: int) -> None:
        """Adds the words of some steps, and the time of the present phase until now."""
        is_skipped = False
        for word in words:
            kind = word >> _SHIFT
            value = word & _VALUE
            if kind < layout.STEPS_BEGAN:
                self._charge(value)
                self._code = kind
            elif kind == layout.STEP_ENDED:
                self._end_step(value, is_skipped)
                is_skipped = False
            elif kind == layout.STEP_SKIPPED:
                is_skipped = True
            elif kind == layout.STEPS_BEGAN:
                # Time outside of any phase counted for nothing until now.
                if self._code == _OTHER:
                    self._charged_ns = max(self._charged_ns, value)
                self._steps_began, self._step_began_ns = True, value
        self._charge(now_ns)

    def _charge(self, until_ns: int) -> None:
        if until_ns <= self._charged_ns:
            return
        if self._code != _OTHER or self._steps_began:
            spent = self._by_phase.get(self._code, 0)
            self._by_phase[self._code] = spent + until_ns - self._charged_ns
        self._charged_ns = until_ns

    def _end_step(self, ended_ns: int, is_skipped: bool) -> None:
        if is_skipped:
            self._skipped += 1
        else:
            self._steps += 1
            if ended_ns > self._step_began_ns:
                self._durations_s.append((ended_ns - self._step_began_ns) / 1e9)
        self._step_began_ns = ended_ns

    def take_durations(self) -> list[float]:
        """How long each step took that was not skipped, since the last call."""
        found, self._durations_s = self._durations_s, []
        return found

    def amounts(self, work: Work, on_device: dict[int, float], method: str) -> list[Amount]:
        """By how much each total has grown since the last call."""
        by_phase, self._by_phase = self._by_phase, {}
        steps, self._steps = self._steps, 0
        skipped, self._skipped = self._skipped, 0
        amounts: list[Amount] = [
            (catalog.TRAINING_PHASE_TIME, _LABELS[code], nanoseconds / 1e9)
            for code, nanoseconds in by_phase.items()
        ]
        amounts += [
            (catalog.TRAINING_PHASE_TIME, _DEVICE_LABELS[code], seconds)
            for code, seconds in on_device.items()
        ]
        *grown, flops = (now - before for now, before in zip(work, self._reported, strict=True))
        self._reported = work
        for metric, amount in (
            (catalog.TRAINING_STEPS, steps),
            *zip(_WORK, grown, strict=True),
        ):
            if amount:
                amounts.append((metric, (), float(amount)))
        if flops:
            amounts.append((catalog.TRAINING_FLOPS, (("method", method),), flops))
        if skipped:
            why = (("reason", "overflow"),)
            amounts.append((catalog.TRAINING_STEPS_SKIPPED, why, float(skipped)))
        return amounts
