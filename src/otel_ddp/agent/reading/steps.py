"""Rebuilds the steps of a process from the 64-bit words that its journal holds of them.

The host's steps and the device's have the same words, and a stream for each.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter, sub
from types import MappingProxyType
from typing import NamedTuple

from otel_ddp.agent.reading.group_calls import CallNames
from otel_ddp.diagnosis.steps import Calls, Parts, Step
from otel_ddp.journal import layout
from otel_ddp.journal.parser import Name, Steps
from otel_ddp.vocabulary.words import PHASES

# Parts beyond this are only summed: no person looks at a step with more.
_MOST_PARTS = 2000
# Threads may record times in another order than they read the clock. A time further back than this
# is from another clock than the time before it.
_DISORDER_NS = 1_000_000_000
_OTHER = PHASES["other"]
_OF_NEARLY_ALL = {layout.STEP_NUMBER, layout.STEP_WORK, layout.STEP_CALLS}


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
            end = codes.find(layout.STEP_ENDED, first) + 1 or count
            at, calls = end, codes.count(layout.STEP_CALL, first, end)
            if calls:
                # One behind the other. There may be hundreds, in many orders.
                at = codes.find(layout.STEP_CALL, first)
                self._calls += record.words[8 * at : 8 * (at + calls)]
            own_codes = codes[first:at] + codes[at + calls : end]
            own_values = values[first:at] + values[at + calls : end]
            step = self._whole_step(own_codes, own_values)
            if step is None:
                self._feed_words(own_codes, own_values, steps)
            else:
                steps.append(step)
            first = end
        return steps

    def _calls_of(self, began_ns: int, told: Mapping[int, Sequence[int]]) -> Calls | None:
        """Those of the step that ends, if all of them are here."""
        words, self._calls = self._calls, b""
        if 8 * told.get(layout.STEP_CALLS, (-1,))[-1] != len(words):
            return None
        return self._call_names.read(words, began_ns)

    def _whole_step(self, codes: bytes, values: Sequence[int]) -> Step | None:
        """The step that these words are in the order of nearly all; else nothing has changed."""
        began_ns = self._began_ns
        if began_ns is None or self._ends or self._told:
            return None
        shape = _shape(self._code, codes)
        if shape is None:
            return None
        created_ns = self._created_ns
        ends_ns = shape.ends(values)
        spans_ns = tuple(map(sub, ends_ns, (began_ns - created_ns, *ends_ns)))
        parts = shape.codes
        if not spans_ns[-1]:
            # The last phase and the step have ended together.
            parts, spans_ns = parts[:-1], spans_ns[:-1]
        if min(spans_ns) <= 0:
            return None
        self._code = shape.code
        self._began_ns = self._until_ns = ended_ns = created_ns + ends_ns[-1]
        told = {code: [values[at] for at in places] for code, places in shape.told}
        calls = self._calls_of(began_ns, told)
        return _step(began_ns, ended_ns, Parts(began_ns, parts, spans_ns), (), told, calls)

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
        spans_ns = tuple(map(sub, self._ends, (began_ns, *self._ends)))
        parts = Parts(began_ns, bytes(self._codes), spans_ns)
        calls = self._calls_of(began_ns, self._told)
        return _step(began_ns, self._until_ns, parts, tuple(self._rest.items()), self._told, calls)


def _step(
    began_ns: int,
    ended_ns: int,
    parts: Parts,
    rest: tuple[tuple[int, int], ...],
    told: Mapping[int, Sequence[int]],
    calls: Calls | None,
) -> Step:
    """*told*: the numbers that the journal tells of it, by their codes."""
    number = told[layout.STEP_NUMBER][-1] if layout.STEP_NUMBER in told else None
    work = sum(told[layout.STEP_WORK]) if layout.STEP_WORK in told else 0
    if told.keys() <= _OF_NEARLY_ALL:
        return Step(number, began_ns, ended_ns, parts, rest, 0.0, False, 0, work, calls=calls)
    return Step(
        number,
        began_ns,
        ended_ns,
        parts,
        rest,
        gc_s=sum(told.get(layout.STEP_GC, ())) / 1e9,
        skipped=layout.STEP_SKIPPED in told,
        retries=sum(told.get(layout.STEP_RETRIES, ())),
        work=work,
        logged=told[layout.STEP_LOGGED][-1] if layout.STEP_LOGGED in told else None,
        paced=tuple(told.get(layout.STEP_PACED, ())),
        lag_ns=told[layout.STEP_LAG][-1] if layout.STEP_LAG in told else None,
        profiled=layout.STEP_PROFILED in told,
        calls=calls,
    )


class _Shape(NamedTuple):
    """Where the words of a whole step have what, if all its times rise."""

    codes: bytes
    """Of its parts."""
    ends: Callable[[Sequence[int]], tuple[int, ...]]
    """The ends of its parts."""
    told: Sequence[tuple[int, Sequence[int]]]
    """By code: the places of the numbers that are no times."""
    code: int
    """The phase that is open at its end."""


# Steps of one training are alike.
@lru_cache(256)
def _shape(code: int, words: bytes) -> _Shape | None:
    """Of a step that begins in the phase *code*; None: its words are read one by one."""
    if layout.STEPS_BEGAN in words or words[-1] != layout.STEP_ENDED or len(words) > _MOST_PARTS:
        return None
    codes, ends, told = bytearray(), list[int](), dict[int, list[int]]()
    for at, word in enumerate(words):
        if word == layout.STEP_ENDED or (word < layout.STEPS_BEGAN and word != code):
            codes.append(code)
            ends.append(at)
            code = word
        elif word > layout.STEP_ENDED:
            told.setdefault(word, []).append(at)
    if len(ends) < 3:
        return None
    return _Shape(bytes(codes), itemgetter(*ends), [*told.items()], codes[-1])
