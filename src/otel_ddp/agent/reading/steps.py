"""Puts the steps of a process together again, from the words that its journal tells of them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import itemgetter, sub
from typing import NamedTuple, overload

from otel_ddp.catalog import PHASES
from otel_ddp.journal import layout
from otel_ddp.journal.layout import PHASE_CODE
from otel_ddp.journal.reader import Steps

# A step of more parts than this is no step of a training loop that anybody would look at closely.
_MOST_PARTS = 2000
# Threads may write their times down in another order than they read the clock. What lies further
# back than this was not written by the clock that told of the time before it.
_DISORDER_NS = 1_000_000_000
_OTHER = PHASES["other"]
# Steps of one training are alike: how to read one of each kind is found out once.
_KINDS_KNOWN = 256
_ENDS = bytes([layout.STEP_ENDED])


class Part(NamedTuple):
    """A stretch of one phase; the code is the journal's, with what the phase waits for."""

    code: int
    began_ns: int
    ended_ns: int

    @property
    def phase(self) -> int:
        """The phase alone."""
        return self.code & PHASE_CODE


class Parts(Sequence[Part]):
    """The parts of a step, made one by one when somebody wants them: most want their sums."""

    __slots__ = ("_began_ns", "codes", "spans_ns")

    def __init__(self, began_ns: int, codes: bytes, spans_ns: Sequence[int]) -> None:
        self._began_ns = began_ns
        self.codes = codes
        self.spans_ns = spans_ns

    def __iter__(self) -> Iterator[Part]:
        edges = pairwise(accumulate(self.spans_ns, initial=self._began_ns))
        return (Part(code, *edge) for code, edge in zip(self.codes, edges, strict=True))

    def __len__(self) -> int:
        return len(self.codes)

    @overload
    def __getitem__(self, at: int) -> Part: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Part, ...]: ...
    def __getitem__(self, at: int | slice) -> Part | tuple[Part, ...]:
        return tuple(self)[at]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Parts, tuple)) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class Step(NamedTuple):
    """One step from the end of the one before it to its own end; times are since 1970."""

    number: int | None
    """Counted alike on all ranks; None where the process did not say it."""
    began_ns: int
    ended_ns: int
    parts: Parts
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
        spans = (*zip(self.parts.codes, self.parts.spans_ns, strict=True), *self.rest)
        return sum(each_ns for code, each_ns in spans if code & PHASE_CODE == phase) / 1e9

    def phases(self) -> set[int]:
        """The phases that it was in."""
        codes = (*self.parts.codes, *[code for code, _ in self.rest])
        return {code & PHASE_CODE for code in codes}


_Values = Callable[[tuple[int, ...]], tuple[int, ...]]


class _Kind(NamedTuple):
    """Where in the words of a step its parts and what is said of it are."""

    times: _Values
    codes: bytes
    but_last: bytes
    last: int
    number: int | None
    logged: int | None
    work: _Values | None
    gc: _Values | None
    retries: _Values | None
    skipped: bool


@lru_cache(_KINDS_KNOWN)
def _kind(code: int, words: bytes) -> _Kind | None:
    """Of a step that begins in one phase, by the codes of its words; None: one by one, please."""
    codes, times = [], []
    said: dict[int, list[int]] = {}
    for at, each in enumerate(words):
        if each == layout.STEPS_BEGAN:
            return None
        if each > layout.STEP_ENDED:
            said.setdefault(each, []).append(at)
        elif each == layout.STEP_ENDED or each != code:
            codes.append(code)
            times.append(at)
            code = code if each == layout.STEP_ENDED else each
    if not 2 <= len(codes) <= _MOST_PARTS:
        return None
    return _Kind(
        itemgetter(*times),
        bytes(codes),
        bytes(codes[:-1]),
        code,
        said.get(layout.STEP_NUMBER, [None])[-1],
        said.get(layout.STEP_LOGGED, [None])[-1],
        _values(said.get(layout.STEP_WORK)),
        _values(said.get(layout.STEP_GC)),
        _values(said.get(layout.STEP_RETRIES)),
        layout.STEP_SKIPPED in said,
    )


def _values(places: list[int] | None) -> _Values | None:
    if not places:
        return None
    # Of one place it would be the value itself.
    return itemgetter(*places) if places[1:] else itemgetter(slice(places[0], places[0] + 1))


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
        self._at_start = True
        self._codes = bytearray()
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
        count = len(record.words) // 8
        self._expected = record.offset + count
        # The codes and the values of all words, each in one go.
        whole = bytearray(record.words)
        codes = bytes(whole[7::8])
        whole[7::8] = bytes(count)
        values = struct.unpack(f"<{count}Q", whole)
        steps: list[Step] = []
        at = 0
        while at < count:
            end = codes.find(_ENDS, at) + 1 or count
            step = self._whole(codes[at:end], values[at:end]) if self._at_start else None
            if step is not None:
                steps.append(step)
            else:
                self._walk(codes[at:end], values[at:end], steps)
            at = end
        return steps

    def _whole(self, words: bytes, values: tuple[int, ...]) -> Step | None:
        """A step that is all there and in order, from its first word to its end."""
        began_ns = self._began_ns
        if began_ns is None or words[-1] != layout.STEP_ENDED:
            return None
        since = began_ns - self._created_ns
        # Nearly always the first phase of a step begins with it.
        at_once = values[0] == since and words[0] < layout.STEPS_BEGAN
        kind = _kind(words[0] if at_once else self._code, words)
        if kind is None:
            return None
        times = kind.times(values)
        codes, spans_ns = kind.codes, tuple(map(sub, times, (since, *times)))
        if not spans_ns[-1]:
            # The step ended with its last phase: what is outside of it begins the next one.
            codes, spans_ns = kind.but_last, spans_ns[:-1]
        if min(spans_ns) <= 0:
            return None
        self._code = kind.last
        self._began_ns = self._until_ns = ended_ns = self._created_ns + times[-1]
        return Step(
            None if kind.number is None else values[kind.number],
            began_ns,
            ended_ns,
            Parts(began_ns, codes, spans_ns),
            (),
            sum(kind.gc(values)) / 1e9 if kind.gc else 0.0,
            kind.skipped,
            sum(kind.retries(values)) if kind.retries else 0,
            sum(kind.work(values)) if kind.work else 0,
            None if kind.logged is None else values[kind.logged],
        )

    def _walk(self, words: bytes, values: tuple[int, ...], steps: list[Step]) -> None:
        """Word by word, as it also goes where steps are in pieces or times in disorder."""
        created_ns = self._created_ns
        for code, value in zip(words, values, strict=True):
            if code < layout.STEPS_BEGAN:
                # Codes of phases that only a later version knows are told as they are.
                if code != self._code:
                    self._spend(created_ns + value)
                    self._code = code
            elif code == layout.STEP_ENDED:
                self._spend(created_ns + value)
                if self._began_ns is not None:
                    steps.append(self._finished(self._began_ns))
                # Where times went back a little, the next step begins where this one was told to.
                self._start(max(created_ns + value, self._until_ns))
            elif code == layout.STEP_NUMBER:
                self._number = value
            elif code == layout.STEP_GC:
                self._gc_ns += value
            elif code == layout.STEP_WORK:
                self._work += value
            elif code == layout.STEP_LOGGED:
                self._logged = value
            elif code == layout.STEP_SKIPPED:
                self._skipped = True
            elif code == layout.STEP_RETRIES:
                self._retries += value
            elif code == layout.STEPS_BEGAN:
                self._start(created_ns + value)
        self._at_start = words[-1] in (layout.STEPS_BEGAN, layout.STEP_ENDED)

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
        spans_ns = tuple(map(sub, self._ends, (began_ns, *self._ends)))
        return Step(
            self._number,
            began_ns,
            self._until_ns,
            Parts(began_ns, bytes(self._codes), spans_ns),
            tuple(self._rest.items()),
            self._gc_ns / 1e9,
            self._skipped,
            self._retries,
            self._work,
            self._logged,
        )
