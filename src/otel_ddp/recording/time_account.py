"""Where the time of the steps goes: adds up what each phase took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from otel_ddp import catalog
from otel_ddp.journal import layout
from otel_ddp.recording.locked_journal import Amount
from otel_ddp.words import PHASE_CODE, PHASES

_CODES = PHASES
_OTHER = _CODES["other"]
_COMM_WAIT = _CODES["comm_wait"]
_SHIFT, _VALUE = layout.CODE_SHIFT, layout.WORD_VALUE

# Marks the time in a phase of the user's own. Time outside of any phase counts for nothing before
# the first step.
NAMED = 0x40


def _labels(code: int, clock: str) -> tuple[tuple[str, str], ...]:
    word = next(word for word, number in _CODES.items() if number == code & PHASE_CODE)
    found: tuple[tuple[str, str], ...] = (("phase", word), ("clock", clock))
    if word == "comm_wait":
        found += (("sync", "buffers" if code & layout.OF_BUFFERS else "gradients"),)
    return found


_ALL_CODES = (*_CODES.values(), _OTHER | NAMED, _COMM_WAIT | layout.OF_BUFFERS)
_LABELS = {code: _labels(code, "host") for code in _ALL_CODES}
_DEVICE_LABELS = {code: _labels(code, "device") for code in _ALL_CODES}


class TimeAccount:
    """Adds up time by phase. One thread at a time."""

    def __init__(self) -> None:
        # The phase up to which time is charged, and when it was.
        self._code, self._charged_ns = _OTHER, 0
        self._steps_began = False
        self._by_phase: dict[int, int] = {}
        self._reported = (0.0, 0.0)

    def add(self, words: Sequence[int], now_ns: int) -> None:
        """Adds the words of some steps, and the time of the present phase until now."""
        for word in words:
            kind = word >> _SHIFT
            if kind < layout.STEPS_BEGAN:
                self._charge(word & _VALUE)
                self._code = kind
            elif kind == layout.STEPS_BEGAN:
                # Time outside of any phase counted for nothing until now.
                if self._code == _OTHER:
                    self._charged_ns = max(self._charged_ns, word & _VALUE)
                self._steps_began = True
        self._charge(now_ns)

    def _charge(self, until_ns: int) -> None:
        if until_ns <= self._charged_ns:
            return
        if self._code != _OTHER or self._steps_began:
            spent = self._by_phase.get(self._code, 0)
            self._by_phase[self._code] = spent + until_ns - self._charged_ns
        self._charged_ns = until_ns

    def amounts(self, on_device: Mapping[int, float], gc_s: float, hook_s: float) -> list[Amount]:
        """By how much each total has grown since the last call."""
        by_phase, self._by_phase = self._by_phase, {}
        (earlier_gc_s, earlier_hook_s), self._reported = self._reported, (gc_s, hook_s)
        amounts: list[Amount] = [
            (catalog.TRAINING_PHASE_TIME, _LABELS[code], nanoseconds / 1e9)
            for code, nanoseconds in by_phase.items()
        ]
        amounts += [
            (catalog.TRAINING_PHASE_TIME, _DEVICE_LABELS[code], seconds)
            for code, seconds in on_device.items()
        ]
        if gc_s != earlier_gc_s:
            amounts.append((catalog.TRAINING_GC_TIME, (), gc_s - earlier_gc_s))
        if hook_s != earlier_hook_s:
            amounts.append((catalog.OTEL_DDP_HOOK_TIME, (), hook_s - earlier_hook_s))
        return amounts
