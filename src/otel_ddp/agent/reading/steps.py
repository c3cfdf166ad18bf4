"""Rebuilds the steps of a process from the 64-bit words that its journal holds of them.

The host's steps and the device's have the same words, and a stream for each.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from operator import sub
from types import MappingProxyType

from otel_ddp.agent.reading.group_calls import CallNames
from otel_ddp.diagnosis.steps import Parts, Step
from otel_ddp.journal import layout
from otel_ddp.journal.parser import Name, Steps
from otel_ddp.vocabulary.words import PHASES

# Parts beyond this are only summed: no person looks at a step with more.
_MOST_PARTS = 2000
# Threads may record times in another order than they read the clock. A time further back than this
# is from another clock than the time before it.
_DISORDER_NS = 1_000_000_000
_OTHER = PHASES["other"]
_CALL = bytes([layout.STEP_CALL])


class StepStream:
    """The steps of one process, fed record by record; damaged content never raises."""

    def __init__(self, created_ns: int, names: Mapping[int, Name] = MappingProxyType({})) -> None:
        """*names*: of the journal, by their numbers."""
        self._created_ns, self._call_names = created_ns, CallNames(names)
        self._expected = 0
        self._forget()

    def set_clock(self, created_ns: int) -> None:
        """When the journal was made, where that is known anew: the open step moves along."""
        moved_ns, self._created_ns = created_ns - self._created_ns, created_ns
        if moved_ns and self._began_ns is not None:
            self._began_ns += moved_ns
            self._until_ns += moved_ns
            self._ends[:] = [each + moved_ns for each in self._ends]

    def _forget(self) -> None:
        """The current step is unknown: the next step begins at the next end of one."""
        self._code = _OTHER
        self._start(None)
        # The words of the calls since the last end of a step.
        self._calls = b""

    def _start(self, now_ns: int | None) -> None:
        self._began_ns = now_ns
        # The end of what is known of the step.
        self._until_ns = now_ns or 0
        self._codes = bytearray()
        self._ends: list[int] = []
        self._rest: dict[int, int] = {}
        # The numbers that the journal tells of it, by their codes.
        self._told: dict[int, list[int]] = {}

    def feed(self, record: Steps) -> list[Step]:
        """The steps that end in this record."""
        if record.offset != self._expected:
            self._forget()
        count = len(record.words) // 8
        self._expected = record.offset + count
        # The codes of all words at once, then all values.
        whole = bytearray(record.words)
        codes = bytes(whole[7::8])
        whole[7::8] = bytes(count)
        values = struct.unpack(f"<{count}Q", whole)
        steps = list[Step]()
        first = 0
        while first < count:
            call = codes.find(_CALL, first)
            end = count if call < 0 else call
            self._feed_words(codes[first:end], values[first:end], steps)
            # Calls come one behind the other. There may be hundreds, in many orders.
            first = count - len(codes[end:].lstrip(_CALL))
            self._calls += record.words[8 * end : 8 * first]
        return steps

    def _feed_words(self, codes: bytes, values: Sequence[int], steps: list[Step]) -> None:
        created_ns = self._created_ns
        for code, value in zip(codes, values, strict=True):
            if code < layout.STEPS_BEGAN:
                # A phase of a later version keeps its unknown code.
                if code != self._code:
                    self._spend(created_ns + value)
                    self._code = code
            elif code == layout.STEP_ENDED:
                self._spend(created_ns + value)
                if self._began_ns is not None:
                    steps.append(self._finished(self._began_ns))
                # If times went back a little, the next step begins at the end of this one.
                self._start(max(created_ns + value, self._until_ns))
                self._calls = b""
            elif code == layout.STEPS_BEGAN:
                self._start(created_ns + value)
            else:
                self._told.setdefault(code, []).append(value)

    def _spend(self, now_ns: int) -> None:
        """End the current phase at this time."""
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
            # A phase that took no time lay between two stretches of this one.
            ends[-1] = now_ns
        elif len(ends) < _MOST_PARTS:
            self._codes.append(code)
            ends.append(now_ns)
        else:
            self._rest[code] = self._rest.get(code, 0) + now_ns - until_ns
        self._until_ns = now_ns

    def _finished(self, began_ns: int) -> Step:
        told = self._told
        words, self._calls = self._calls, b""
        calls = None
        # If all of them are here.
        idle, count = divmod(told.get(layout.STEP_CALLS, (-1,))[-1], 1 << layout.CALL_IDLE_SHIFT)
        if 8 * count == len(words):
            calls = self._call_names.read(words, idle & 0xFF, began_ns)
        spans_ns = tuple(map(sub, self._ends, (began_ns, *self._ends)))
        return Step(
            told[layout.STEP_NUMBER][-1] if layout.STEP_NUMBER in told else None,
            began_ns,
            self._until_ns,
            Parts(began_ns, bytes(self._codes), spans_ns),
            tuple(self._rest.items()),
            gc_s=sum(told.get(layout.STEP_GC, ())) / 1e9,
            skipped=layout.STEP_SKIPPED in told,
            retries=sum(told.get(layout.STEP_RETRIES, ())),
            work=sum(told.get(layout.STEP_WORK, ())),
            logged=told[layout.STEP_LOGGED][-1] if layout.STEP_LOGGED in told else None,
            paced=tuple(told.get(layout.STEP_PACED, ())),
            lag_ns=told[layout.STEP_LAG][-1] if layout.STEP_LAG in told else None,
            profiled=layout.STEP_PROFILED in told,
            calls=calls,
        )
