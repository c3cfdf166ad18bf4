"""Decodes the steps of a process from 64-bit words in its journal.

Steps are timed on the host's clock and on the device's clock. Both have the same format, but each
clock has its own stream of words.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from operator import sub
from types import MappingProxyType

from otel_ddp.diagnosis.steps import Call, Calls, Collective, Parts, Step
from otel_ddp.journal import layout
from otel_ddp.journal.parser import Name, Steps
from otel_ddp.vocabulary.words import PHASES, UNUSUAL_PHASES

# How many parts of a step are stored in order; the times of further parts are summed by phase.
MOST_PARTS = 2000
# Threads may record times a little out of order. A time that is earlier than the one before it by
# more than this comes from another clock, or is damaged.
_DISORDER_NS = 1_000_000_000
_OTHER = PHASES["other"]
_CALL = bytes([layout.STEP_CALL])


class StepStream:
    """The steps of one process, timed on one clock. Damaged records never raise an exception."""

    def __init__(self, created_ns: int, names: Mapping[int, Name] = MappingProxyType({})) -> None:
        """*names*: the names defined in the journal, by their numbers. They describe calls."""
        self.created_ns = created_ns
        """When the journal was created. For a remote process, it changes with the clock offset."""
        self._call_names = CallNames(names)
        self._expected = 0
        self._forget()

    def _forget(self) -> None:
        """Drop the step being decoded. Decoding resumes with the step after it."""
        self._code = _OTHER
        self._start(None)
        # The 64-bit words of the calls since the last step ended.
        self._calls = b""

    def _start(self, now_ns: int | None) -> None:
        # All times of the step being decoded are relative to the creation of the journal.
        self._began_ns = now_ns
        # The time at which the last part of the step ended.
        self._until_ns = now_ns or 0
        self._codes = bytearray()
        self._ends: list[int] = []
        self._rest: dict[int, int] = {}
        # The other values of the step being decoded, by code: `STEP_NUMBER`, `STEP_GC`, ...
        self._numbers: dict[int, list[int]] = {}

    def feed(self, record: Steps) -> list[Step]:
        """Decode a record; returns the steps that end in it."""
        if record.offset != self._expected:
            self._forget()
        count = len(record.words) // 8
        self._expected = record.offset + count
        # Split all words at once: the highest byte is the code, the other bytes are the value.
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
            # Take all consecutive calls at once, since a step may have hundreds.
            first = count - len(codes[end:].lstrip(_CALL))
            self._calls += record.words[8 * end : 8 * first]
        return steps

    def _feed_words(self, codes: bytes, values: Sequence[int], steps: list[Step]) -> None:
        for code, value in zip(codes, values, strict=True):
            if code < layout.STEPS_BEGAN:
                # This code means that a phase begins. An unknown one is a phase of a later version
                # of otel_ddp.
                if code != self._code:
                    self._spend(value)
                    self._code = code
            elif code == layout.STEP_ENDED:
                self._spend(value)
                if self._began_ns is not None:
                    steps.append(self._finished(self._began_ns))
                # The next step begins where this one ended, even if its own time is a little
                # earlier.
                self._start(max(value, self._until_ns))
                self._calls = b""
            elif code == layout.STEPS_BEGAN:
                self._start(value)
            else:
                self._numbers.setdefault(code, []).append(value)

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
            # The phase was only interrupted by a phase without duration: extend its last part.
            ends[-1] = now_ns
        elif len(ends) < MOST_PARTS:
            self._codes.append(code)
            ends.append(now_ns)
        else:
            self._rest[code] = self._rest.get(code, 0) + now_ns - until_ns
        self._until_ns = now_ns

    def _finished(self, began_ns: int) -> Step:
        numbers, began_at_ns = self._numbers, self.created_ns + began_ns
        words, self._calls = self._calls, b""
        calls = None
        # `STEP_CALLS` says how many calls the step made. Decode them only if all of them were read.
        idle, count = divmod(numbers.get(layout.STEP_CALLS, (-1,))[-1], 1 << layout.CALL_IDLE_SHIFT)
        if 8 * count == len(words):
            calls = self._call_names.read(words, idle & 0xFF, began_at_ns)
        codes = bytes([*self._codes, *self._rest])
        spans_ns = (*map(sub, self._ends, (began_ns, *self._ends)), *self._rest.values())
        return Step(
            numbers[layout.STEP_NUMBER][-1] if layout.STEP_NUMBER in numbers else None,
            began_at_ns,
            self.created_ns + self._until_ns,
            Parts(began_at_ns, codes, spans_ns),
            gc_s=sum(numbers.get(layout.STEP_GC, ())) / 1e9,
            skipped=layout.STEP_SKIPPED in numbers,
            retries=sum(numbers.get(layout.STEP_RETRIES, ())),
            work=sum(numbers.get(layout.STEP_WORK, ())),
            logged=numbers[layout.STEP_LOGGED][-1] if layout.STEP_LOGGED in numbers else None,
            paced=tuple(numbers.get(layout.STEP_PACED, ())),
            lag_ns=numbers[layout.STEP_LAG][-1] if layout.STEP_LAG in numbers else None,
            profiled=layout.STEP_PROFILED in numbers,
            calls=calls,
            collectives=self._call_names.sums(
                numbers[layout.STEP_CALL_COUNT], numbers.get(layout.STEP_CALL_BYTES, ())
            )
            if layout.STEP_CALL_COUNT in numbers
            else None,
        )


# -- the calls to process groups of a step

# Bytes of the word of a call: the lowest bytes are its time, then one byte is the idle share before
# it, and two bytes are the number of its name.
_IDLE, _LOW = layout.CALL_IDLE_SHIFT // 8, layout.CALL_SHIFT // 8
_HIGH = _LOW + 1
# Limit of cached sequences of calls. Most programs repeat one or a few sequences in all steps.
_MOST_SEQUENCES = 64
# The types of a Call's fields, to check the JSON of a call's name.
_KINDS = [str, str, str, int, str, str]


class CallNames:
    """Decodes the calls of one process. The name of each call is JSON that describes the call."""

    def __init__(self, names: Mapping[int, Name]) -> None:
        self._names = names
        # Decoded sequences of calls. The key holds the numbers of their names: first the low byte
        # of each number, then the high byte of each.
        self._sequences: dict[bytes, tuple[Call, ...]] = {}

    def read(self, words: bytes, rest_idle: int, began_ns: int) -> Calls | None:
        """The calls of a step; None if a name is missing.

        *rest_idle*: the idle share after the last call.
        """
        # Hot path: this runs for each measured step of each rank, so it decodes all words at once.
        whole = bytearray(words)
        low, high = whole[_LOW::8], whole[_HIGH::8]
        each = self._sequences.get(bytes(low + high)) or self._sequence(low, high)
        if each is None:
            return None
        # The word of a call has the idle share before this call. Shift the shares by one, so that
        # each call has the idle share after it.
        idle = bytes(whole[_IDLE + 8 :: 8]) + bytes([rest_idle] if words else [])
        for at in range(_IDLE, 8):
            whole[at::8] = bytes(len(low))
        times_ns = array("Q", bytes(whole))
        at_ns = [began_ns + (after << layout.CALL_UNIT_SHIFT) for after in times_ns]
        return Calls(each, array("q", at_ns), idle)

    def sums(self, *sums: Sequence[int]) -> dict[Collective, list[int]]:
        """Calls and bytes in a step, by collective.

        *sums*: the words that count the calls by name, and the words that count their bytes.
        """
        found: dict[Collective, list[int]] = {}
        for at, words in enumerate(sums):
            for word in words:
                number, amount = divmod(word, 1 << layout.CALL_SHIFT)
                call = _call(self._names.get(number))
                # Skip calls in unusual phases, such as an evaluation: they do not belong to a
                # normal step.
                if call is not None and call.phase not in UNUSUAL_PHASES:
                    found.setdefault(call.kind, [0] * len(sums))[at] += amount
        return found

    def _sequence(self, low: bytearray, high: bytearray) -> tuple[Call, ...] | None:
        found = [
            _call(self._names.get(number + (more << 8)))
            for number, more in zip(low, high, strict=True)
        ]
        each = tuple(call for call in found if call is not None)
        if len(each) < len(found):
            return None
        if len(self._sequences) >= _MOST_SEQUENCES:
            self._sequences.clear()
        shared = self._sequences[bytes(low + high)] = _shared(each)
        return shared


@lru_cache(1024)
def _shared(each: tuple[Call, ...]) -> tuple[Call, ...]:
    """Return the same tuple for all ranks with this sequence of calls, to save memory."""
    return each


@lru_cache(4096)
def _call(name: Name | None) -> Call | None:
    try:
        content = json.loads(name.text) if name is not None else None
    except ValueError:
        return None
    if not isinstance(content, list) or [type(field) for field in content] != _KINDS:
        return None
    return Call(*content)
