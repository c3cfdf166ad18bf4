"""Guards a process's journal: one thread at a time, and no signal handler in the middle of it."""

from __future__ import annotations

import json
import struct
import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from otel_ddp import catalog, containment
from otel_ddp.journal import layout
from otel_ddp.journal.writer import JournalWriter
from otel_ddp.recording import values
from otel_ddp.settings import Settings

T = TypeVar("T")

# By how much which total grows: its metric, its attributes, the amount.
Amount = tuple[catalog.Metric, tuple[tuple[str, str], ...], float]

_MOST_WARNINGS = 50
# Of a stream in one record; the smallest ring takes a record of 18 kB.
_MOST_WORDS = 1000


class LockedJournal:
    """Knows the totals, the facts and the state of a process; of logged values it knows nothing."""

    def __init__(self, writer: JournalWriter, conf: Settings) -> None:
        self.writer = writer
        # The last step of training that was logged, or counted for values without a step: of these
        # there were so many, less one.
        self.step = self.implied_steps = -1
        # Whether hooks count the steps.
        self.steps_counted = False
        # From when on the next look around is due; at once, where a signal handler was refused.
        self.check_due_ns = 0
        self._conf = conf
        # Also that of whoever tells where the process stands: with two, threads that take them in
        # turn could wait for each other.
        self.lock = threading.RLock()
        self.inside = False
        self._closed = False
        self._interrupted = 0
        self.deferred: Callable[[], None] | None = None
        self._texts: dict[str, int] = {}
        self._totals: dict[tuple[str, ...], int] = {}
        self._slots: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
        self._said: Mapping[str, Any] = {}
        self._facts: dict[str, Any] = {}
        self._config: dict[str, Any] = {}
        self._warned: set[str] = set()

    # -- one at a time

    def _locked(self, act: Callable[[], T], otherwise: T) -> T:
        """Touch the journal. `quick_log` does the same by itself, to save the calls."""
        with self.lock:
            if self._closed:
                return otherwise
            if self.inside:
                self.note_reentry()
                return otherwise
            self.inside = True
            try:
                return act()
            finally:
                self.inside = False
                if self.deferred is not None:
                    self.run_deferred()

    def note_reentry(self) -> None:
        # A signal handler that logs while its own thread is inside log: the lock lets it in, and
        # writing now would tear what is being written. Even counting has to wait.
        self._interrupted += 1
        self.check_due_ns = 0

    def defer(self, act: Callable[[], None]) -> bool:
        """Whether this came in the middle of a writing: then it is done right after that."""
        with self.lock:
            if self.inside:
                self.deferred = act
            return self.inside

    def run_deferred(self) -> None:
        act, self.deferred = self.deferred, None
        if act is not None:
            act()

    def _count_interrupted(self) -> None:
        """Count what signal handlers said at a bad moment."""
        lost, self._interrupted = self._interrupted, 0
        if lost:
            text = "a value logged by a signal handler was lost: it came in the middle of another"
            self.refuse("reentered", "reentered", text, lost)

    def close(self) -> None:
        """Let go of the journal; what other threads still say is left unsaid."""
        with self.lock:
            self._closed = True
            self.writer.close()

    # -- documents

    def identity(self, content: Mapping[str, Any]) -> bool | None:
        """Say who this process is; False if that found no room, None if now is a bad moment."""
        written: bool | None = self._locked(partial(self._identify, content), None)
        return written

    def _identify(self, content: Mapping[str, Any]) -> bool:
        # Threads that find out at once say it once.
        if content != self._said and not self.writer.document(layout.IDENTITY, content):
            return False
        self._said = content
        return True

    def facts(self, content: Mapping[str, Any]) -> None:
        """Add to what is known of this program; said twice, it is written once."""
        new = {key: value for key, value in content.items() if self._facts.get(key) != value}
        if not new:
            return
        written = self._locked(partial(self.writer.document, layout.FACTS, new), None)
        if written:
            self._facts.update(new)
        elif written is not None:
            text = "what is known of this program found no room (OTEL_DDP_JOURNAL_BYTES)"
            self.refuse("value", "facts", text)

    def config(self, content: Mapping[str, Any]) -> list[str]:
        """Record what is new in a configuration; the names of what found no room."""
        new = {
            key: value
            for key, value in content.items()
            if key not in self._config or self._config[key] != value
        }
        left, size = list(new), len(new)
        # As many as there is room for, the first ones first.
        while left and size:
            part = {key: new[key] for key in left[:size]}
            if self._locked(partial(self._configure, part), False):
                del left[:size]
            else:
                size //= 2
        return left

    @property
    def settings(self) -> Mapping[str, Any]:
        """The configuration as far as it is recorded, in the order in which it was said."""
        return self._config

    def _configure(self, new: Mapping[str, Any]) -> bool:
        if not self.writer.document(layout.CONFIG, new):
            return False
        self._config.update(new)
        return True

    def append(self, kind: int, content: Mapping[str, Any]) -> None:
        """Record a span or an event."""
        payload = json.dumps(content, separators=(",", ":")).encode()
        if not self._locked(lambda: self.writer.append(kind, payload), True):
            shown = values.shown(content.get("name"))
            self.refuse("value", "record", f"{shown} was not recorded: it is too large")

    def append_words(self, kind: int, before: int, words: Sequence[int]) -> None:
        """Append a piece of a stream of words, of which there were some before."""
        for at in range(0, len(words), _MOST_WORDS):
            piece = words[at : at + _MOST_WORDS]
            payload = struct.pack(f"<{len(piece) + 1}Q", before + at, *piece)
            self._locked(partial(self.writer.append, kind, payload), False)

    # -- totals

    def refuse(self, why: str, place: str, text: str, amount: float = 1.0) -> None:
        """Count what was not recorded, and warn once a place."""
        self.count(catalog.OTEL_DDP_VALUES_REFUSED, amount, why=why)
        if place not in self._warned and len(self._warned) < _MOST_WARNINGS:
            self._warned.add(place)
            containment.log.warning("%s.", text)

    def count(self, metric: catalog.Metric, amount: float = 1.0, **attributes: str) -> bool:
        """Raise a cumulative total; False if there is no room for it."""
        return self._locked(lambda: self._count(metric, amount, attributes), True)

    def _count(self, metric: catalog.Metric, amount: float, attributes: Mapping[str, str]) -> bool:
        place = self._total(metric, attributes)
        self.writer.add(place, amount)
        return place >= 0

    def raise_totals(self, amounts: Sequence[Amount]) -> None:
        """Raise several totals at once."""
        self._locked(lambda: self._raise_totals(amounts), None)

    def _raise_totals(self, amounts: Sequence[Amount]) -> None:
        for metric, labels, amount in amounts:
            place = self._slots.get((metric.name, labels))
            if place is None:
                place = self._total(metric, dict(labels))
                self._slots[(metric.name, labels)] = place
            self.writer.add(place, amount)

    def stamp(self, metric: catalog.Metric, value: float, **attributes: str) -> None:
        """Overwrite a value of which only the last one counts."""
        self._locked(lambda: self.writer.set(self._total(metric, attributes), value), None)

    def observe(self, metric: catalog.Metric, value: float) -> None:
        """Put a value into a histogram."""
        self._locked(lambda: self._observe(metric, value), None)

    def observe_all(self, metric: catalog.Metric, found: Sequence[float]) -> None:
        """Put several values into a histogram."""
        for value in found:
            self.observe(metric, value)

    def _observe(self, metric: catalog.Metric, value: float) -> None:
        place = self._totals.get((metric.name,))
        if place is None:
            place = self.writer.histogram(metric.name, metric.bounds)
            self._totals[(metric.name,)] = place
        if place >= 0:
            self.writer.add(place, value)
            self.writer.add(place + 1 + bisect_left(metric.bounds, value), 1.0)

    def _total(self, metric: catalog.Metric, attributes: Mapping[str, str]) -> int:
        key = (metric.name, *attributes.values())
        place = self._totals.get(key)
        if place is None:
            of_name = "name" in attributes
            place = self._totals[key] = self.writer.counter(metric.name, attributes, of_name)
        return place

    # -- how it is doing

    def text_number(self, text: str) -> int:
        """The number of a word that the progress refers to; 0 where no more fit."""
        return self._locked(lambda: self._text_number(text), 0)

    def _text_number(self, text: str) -> int:
        if text not in self._texts and len(self._texts) < self._conf.max_names:
            self._texts[text] = self.writer.name(text)
        return self._texts.get(text, 0)

    def step_duration(self, seconds: float) -> None:
        """Overwrite how long the last step took."""
        self._locked(lambda: self.writer.step_duration(seconds), None)

    # The two below are single words: a signal handler may come in between, another thread's close
    # may not.

    def phase(self, code: int, name: int, since_ns: int, expect_ms: int) -> bool:
        """Overwrite what this process is busy with, and its step; False if it was closed."""
        with self.lock:
            if not self._closed:
                self._show_step()
                self.writer.expect_ms(expect_ms)
                self.writer.phase(code, name, since_ns)
            return not self._closed

    def state(self, code: int, since_us: int) -> None:
        """Overwrite how this process is doing, and its step."""
        with self.lock:
            if not self._closed:
                self._show_step()
                self.writer.state(code, since_us)

    def _show_step(self) -> None:
        # Where hooks count the steps they show them, too.
        if not self.steps_counted:
            self.writer.step(self.step)

    def reason(self, text: str) -> None:
        """Say why the run ended."""
        self._locked(lambda: self.writer.reason(text), None)
