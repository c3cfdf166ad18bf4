"""The lock around a journal: one thread writes at a time, and no signal handler in between."""

from __future__ import annotations

import json
import struct
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from otel_ddp import catalog
from otel_ddp.errors import containment
from otel_ddp.journal import layout
from otel_ddp.journal.writer import JournalWriter
from otel_ddp.recording import values
from otel_ddp.recording.secrets import without_secrets
from otel_ddp.settings import Settings

T = TypeVar("T")

# By how much which total grows: its metric, its attributes, the amount.
Amount = tuple[catalog.Metric, tuple[tuple[str, str], ...], float]

_MOST_WARNINGS = 50
_LONGEST_REASON = 4000
# Of a stream in one record; the smallest ring takes a record of 18 kB.
_MOST_WORDS = 1000


class LockedJournal:
    """Writes the totals, the facts and the state of a process. Logged values are the recorder's."""

    def __init__(self, writer: JournalWriter, conf: Settings) -> None:
        self.writer = writer
        # The last training step that was logged, or implied by calls without a step; and the last
        # implied one. Both count from 0, and -1 means none.
        self.step = self.implied_steps = -1
        # Whether the hooks count the steps.
        self.steps_counted = False
        # When the next check is due; at once if a signal handler was refused.
        self.check_due_ns = 0
        self._conf = conf
        # Progress uses this lock too: two locks taken in turn could deadlock.
        self.lock = threading.RLock()
        self.inside = False
        self._closed = False
        self._interrupted = 0
        self.deferred: Callable[[], None] | None = None
        self._texts: dict[str, int] = {}
        self._totals: dict[tuple[str, ...], int] = {}
        self._slots: dict[tuple[str, tuple[tuple[str, str], ...]], int] = {}
        # The identity that was written last.
        self._identity: Mapping[str, Any] = {}
        self._facts: dict[str, Any] = {}
        self._config: dict[str, Any] = {}
        self._warned: set[str] = set()

    # -- one writer at a time

    def _locked(self, act: Callable[[], T], default: T) -> T:
        """Writes to the journal. `quick_log` does the same by itself, to save the calls."""
        with self.lock:
            if self._closed:
                return default
            if self.inside:
                self.note_reentry()
                return default
            self.inside = True
            try:
                return act()
            finally:
                self.inside = False
                if self.deferred is not None:
                    self.run_deferred()

    def note_reentry(self) -> None:
        """Notes a call of a signal handler that has interrupted a write of its own thread.

        The lock lets it in, but a second write would damage the first one. Even counting it waits.
        """
        self._interrupted += 1
        self.check_due_ns = 0

    def defer(self, act: Callable[[], None]) -> bool:
        """Whether this call interrupted a write. If so, the act is done right after that."""
        with self.lock:
            if self.inside:
                self.deferred = act
            return self.inside

    def run_deferred(self) -> None:
        """Does what was deferred to the end of a write."""
        act, self.deferred = self.deferred, None
        if act is not None:
            act()

    def _count_interrupted(self) -> None:
        """Counts the calls of signal handlers that interrupted a write."""
        lost, self._interrupted = self._interrupted, 0
        if lost:
            text = "a value logged by a signal handler was lost: it came in the middle of another"
            self.refuse("reentered", "reentered", text, lost)

    def close(self) -> None:
        """Closes the journal; later calls of other threads write nothing."""
        with self.lock:
            self._closed = True
            self.writer.close()

    # -- documents

    def identity(self, content: Mapping[str, Any]) -> bool | None:
        """Writes the identity; False if it found no room, None if this call interrupted a write."""
        written: bool | None = self._locked(partial(self._identify, content), None)
        return written

    def _identify(self, content: Mapping[str, Any]) -> bool:
        # Several threads may find out at once.
        if content != self._identity and not self.writer.document(layout.IDENTITY, content):
            return False
        self._identity = content
        return True

    def facts(self, content: Mapping[str, Any]) -> None:
        """Adds facts about this program; only new ones are written."""
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
        """Records the new settings of a configuration; returns the names that found no room."""
        new = {
            key: value
            for key, value in content.items()
            if key not in self._config or self._config[key] != value
        }
        left, size = list(new), len(new)
        # As many as find room, in their order.
        while left and size:
            part = {key: new[key] for key in left[:size]}
            if self._locked(partial(self._configure, part), False):
                del left[:size]
            else:
                size //= 2
        return left

    @property
    def hidden_names(self) -> Collection[str]:
        """Names of the user's whose values are not recorded."""
        return self._conf.hidden_names

    @property
    def settings(self) -> Mapping[str, Any]:
        """The recorded configuration, in the order of its recording."""
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
        """Appends words to a stream; *before* is the number of its earlier words."""
        for at in range(0, len(words), _MOST_WORDS):
            piece = words[at : at + _MOST_WORDS]
            payload = struct.pack(f"<{len(piece) + 1}Q", before + at, *piece)
            self._locked(partial(self.writer.append, kind, payload), False)

    # -- totals

    def refuse(self, why: str, place: str, text: str, amount: float = 1.0) -> None:
        """Counts a value that was not recorded, and warns once a place."""
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

    def place(self, metric: catalog.Metric, **attributes: str) -> int:
        """Where in the totals this one is, or where its histogram begins; -1: there is no room."""
        find = partial(self._total, metric, attributes)
        return self._locked(partial(self._histogram, metric) if metric.bounds else find, -1)

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

    def _observe(self, metric: catalog.Metric, value: float) -> None:
        place = self._histogram(metric)
        if place >= 0:
            self.writer.add(place, value)
            self.writer.add(place + 1 + bisect_left(metric.bounds, value), 1.0)

    def _histogram(self, metric: catalog.Metric) -> int:
        place = self._totals.get((metric.name,))
        if place is None:
            place = self.writer.histogram(metric.name, metric.bounds)
            self._totals[(metric.name,)] = place
        return place

    def _total(self, metric: catalog.Metric, attributes: Mapping[str, str]) -> int:
        key = (metric.name, *attributes.values())
        place = self._totals.get(key)
        if place is None:
            of_name = "name" in attributes
            place = self._totals[key] = self.writer.counter(metric.name, attributes, of_name)
        return place

    # -- progress

    def text_number(self, text: str) -> int:
        """The number of a text that the progress refers to; 0 if no more fit."""
        return self._locked(lambda: self._text_number(text), 0)

    def _text_number(self, text: str) -> int:
        if text not in self._texts and len(self._texts) < self._conf.max_names:
            self._texts[text] = self.writer.name(text)
        return self._texts.get(text, 0)

    def step_duration(self, seconds: float) -> None:
        """Overwrite how long the last step took."""
        self._locked(lambda: self.writer.step_duration(seconds), None)

    # The next two write single words: a signal handler may interrupt them, but another thread must
    # not close the journal meanwhile.

    def phase(self, code: int, name: int, since_ns: int, expect_ms: int) -> bool:
        """Overwrites the phase of this process, and its step; False if the journal is closed."""
        with self.lock:
            if not self._closed:
                self._write_step()
                self.writer.expect_ms(expect_ms)
                self.writer.phase(code, name, since_ns)
            return not self._closed

    def state(self, code: int, since_us: int) -> None:
        """Overwrites the state of this process, and its step."""
        with self.lock:
            if not self._closed:
                self._write_step()
                self.writer.state(code, since_us)

    def _write_step(self) -> None:
        # If the hooks count the steps, they write them too.
        if not self.steps_counted:
            self.writer.step(self.step)

    def reason(self, text: str) -> None:
        """Say why the run ended."""
        clean = without_secrets(text[:_LONGEST_REASON])
        self._locked(lambda: self.writer.reason(clean), None)
