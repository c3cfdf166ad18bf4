"""Puts the steps of a process together again, from the words that its journal tells of them."""

from __future__ import annotations

from typing import NamedTuple

from otel_ddp.catalog import PHASES
from otel_ddp.journal import layout
from otel_ddp.journal.layout import CODE_SHIFT, PHASE_CODE, WORD_VALUE
from otel_ddp.journal.reader import Steps

# A step of more parts than this is no step of a training loop that anybody would look at closely.
_MOST_PARTS = 2000
# Threads may write their times down in another order than they read the clock. What lies further
# back than this was not written by the clock that told of the time before it.
_DISORDER_NS = 1_000_000_000
_OTHER = PHASES["other"]
# Looked up for every word of every step of every process: names of our own are found faster.
_STEPS_BEGAN, _STEP_ENDED = layout.STEPS_BEGAN, layout.STEP_ENDED
_STEP_NUMBER, _STEP_GC, _STEP_WORK = layout.STEP_NUMBER, layout.STEP_GC, layout.STEP_WORK


class Part(NamedTuple):
    """A stretch of one phase; the code is the journal's, with what the phase waits for."""

    code: int
    began_ns: int
    ended_ns: int

    @property
    def phase(self) -> int:
        """The phase alone."""
        return self.code & PHASE_CODE


class Step(NamedTuple):
    """One step from the end of the one before it to its own end; times are since 1970."""

    number: int | None
    """Counted alike on all ranks; None where the process did not say it."""
    began_ns: int
    ended_ns: int
    parts: tuple[Part, ...]
    """Without gaps from the beginning on, and to the end unless there is a rest."""
    rest: tuple[tuple[int, int], ...]
    """Of a step of very many parts: codes, and nanoseconds spent in each after the last part."""
    gc_s: float
    skipped: bool
    retries: int
    work: int = 0
    """Tokens, or samples where there are none; 0 where neither is known."""
    logged: int | None = None
    """Under which number the user logs it, where that is another one."""

    @property
    def took_ns(self) -> int:
        """How long it took: as long as its parts and its rest together."""
        return self.ended_ns - self.began_ns

    def seconds(self, phase: int) -> float:
        """How long it was in a phase, whatever that waited for."""
        spent = sum(end - began for code, began, end in self.parts if code & PHASE_CODE == phase)
        spent += sum(each for code, each in self.rest if code & PHASE_CODE == phase)
        return spent / 1e9

    def phases(self) -> set[int]:
        """The phases that it was in."""
        found = {code & PHASE_CODE for code, _, _ in self.parts}
        found.update(code & PHASE_CODE for code, _ in self.rest)
        return found


class StepStream:
    """One process's story of its steps, fed in pieces; whatever they hold, nothing here raises."""

    def __init__(self, created_ns: int) -> None:
        self._created_ns = created_ns
        self._expected = 0
        self._forget()

    def _forget(self) -> None:
        """What is under way is not known, or no longer: the next end of a step is a beginning."""
        self._code = _OTHER
        self._start(None)

    def _start(self, now_ns: int | None) -> None:
        self._began_ns = now_ns
        # Up to when the step is told of.
        self._until_ns = now_ns or 0
        self._codes: list[int] = []
        self._ends: list[int] = []
        self._rest: dict[int, int] = {}
        self._number: int | None = None
        self._gc_ns = 0
        self._skipped = False
        self._retries = 0
        self._work = 0
        self._logged: int | None = None

    def feed(self, record: Steps) -> list[Step]:
        """The steps that end in this piece."""
        if record.offset != self._expected:
            self._forget()
        self._expected = record.offset + len(record.words)
        created_ns = self._created_ns
        steps: list[Step] = []
        for word in record.words:
            code, value = word >> CODE_SHIFT, word & WORD_VALUE
            if code < _STEPS_BEGAN:
                # Codes of phases that only a later version knows are told as they are.
                if code != self._code:
                    self._spend(created_ns + value)
                    self._code = code
            elif code == _STEP_ENDED:
                self._spend(created_ns + value)
                if self._began_ns is not None:
                    steps.append(self._finished(self._began_ns))
                # Where times went back a little, the next step begins where this one was told to.
                self._start(max(created_ns + value, self._until_ns))
            elif code == _STEP_NUMBER:
                self._number = value
            elif code == _STEP_GC:
                self._gc_ns += value
            elif code == _STEP_WORK:
                self._work += value
            elif code == layout.STEP_LOGGED:
                self._logged = value
            elif code == layout.STEP_SKIPPED:
                self._skipped = True
            elif code == layout.STEP_RETRIES:
                self._retries += value
            elif code == _STEPS_BEGAN:
                self._start(created_ns + value)
        return steps

    def _spend(self, now_ns: int) -> None:
        """The phase that was goes up to here."""
        until_ns = self._until_ns
        if self._began_ns is None:
            return
        if now_ns <= until_ns:
            if until_ns - now_ns > _DISORDER_NS:
                self._forget()
            return
        code = self._code
        ends = self._ends
        if ends and self._codes[-1] == code and ends[-1] == until_ns:
            # Between two stretches of one phase lay another one that took no time.
            ends[-1] = now_ns
        elif len(ends) < _MOST_PARTS:
            self._codes.append(code)
            ends.append(now_ns)
        else:
            self._rest[code] = self._rest.get(code, 0) + now_ns - until_ns
        self._until_ns = now_ns

    def _finished(self, began_ns: int) -> Step:
        begins = [began_ns, *self._ends]
        return Step(
            self._number,
            began_ns,
            self._until_ns,
            tuple(map(Part, self._codes, begins, self._ends)),
            tuple(self._rest.items()),
            self._gc_ns / 1e9,
            self._skipped,
            self._retries,
            self._work,
            self._logged,
        )
