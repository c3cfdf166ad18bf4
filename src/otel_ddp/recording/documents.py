"""Writes documents about a process (identity, facts, configuration) and names of values."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from otel_ddp.journal import layout
from otel_ddp.journal.writer import Gate, JournalWriter
from otel_ddp.recording import values
from otel_ddp.recording.secrets import without_secrets
from otel_ddp.recording.totals import Totals

_LONGEST_REASON = 4000
# The most words in one record, which then takes 8 kB; the smallest ring accepts records of 18 kB.
_MOST_WORDS = 1000
# The most names per process. Each becomes several time series: 1,000 names on 10,000 ranks are
# 30 million series.
_MOST_NAMES = 1000


class Documents:
    """Writes a process's identity, configuration and facts into its journal, if they are new."""

    def __init__(self, gate: Gate, writer: JournalWriter, totals: Totals) -> None:
        self._gate, self._writer, self._totals = gate, writer, totals
        self._identity: Mapping[str, Any] = {}
        self._config: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}

    def identity(self, content: Mapping[str, Any]) -> bool | None:
        """Write the identity, if it has changed. True if it is written now or was before; False if
        the journal has no room for it.

        None if nothing can be written: this call interrupts another write, or the journal is
        closed.
        """
        written: bool | None = self._gate.write(partial(self._identify, content), None)
        return written

    def _identify(self, content: Mapping[str, Any]) -> bool:
        # Several threads may detect the same identity at the same time: write it once.
        if content != self._identity and not self._writer.document(layout.IDENTITY, content):
            return False
        self._identity = content
        return True

    def facts(self, content: Mapping[str, Any]) -> None:
        """Write those facts about this program that are new or have changed."""
        new = {key: value for key, value in content.items() if self._facts.get(key) != value}
        if not new:
            return
        written = self._gate.write(partial(self._writer.document, layout.FACTS, new), None)
        if written:
            self._facts.update(new)
        elif written is not None:
            text = "facts about this program did not fit into the journal (OTEL_DDP_JOURNAL_BYTES)"
            self._totals.refuse("value", "facts", text)

    def config(self, content: Mapping[str, Any]) -> list[str]:
        """Record new settings of a configuration; returns the names for which there is no room."""
        known, none = self._config, object()
        new = {key: value for key, value in content.items() if known.get(key, none) != value}
        left, size = list(new), len(new)
        # If settings do not fit into the journal together, try half as many at a time, so that as
        # many as possible get in.
        while left and size:
            part = {key: new[key] for key in left[:size]}
            if self._gate.write(partial(self._writer.document, layout.CONFIG, part), False):
                known.update(part)
                del left[:size]
            else:
                size //= 2
        return left

    def append(self, kind: int, content: Mapping[str, Any]) -> None:
        """Record a span or an event."""
        payload = json.dumps(content, separators=(",", ":")).encode()
        if not self._gate.write(lambda: self._writer.append(kind, payload), True):
            shown = values.shown(content.get("name"))
            self._totals.refuse("value", "record", f"{shown} was not recorded: it is too large")

    def append_words(self, kind: int, before: int, words: Sequence[int]) -> None:
        """Append words to a stream of the journal. *before*: the number of words that the stream
        already has."""
        for at in range(0, len(words), _MOST_WORDS):
            # `array` is faster than `struct`, which parses a new format for each number of words.
            payload = array("Q", [before + at, *words[at : at + _MOST_WORDS]]).tobytes()
            self._gate.write(partial(self._writer.append, kind, payload), False)

    def reason(self, text: str) -> None:
        """Write why the run ended."""
        clean = without_secrets(text[:_LONGEST_REASON])
        self._gate.write(lambda: self._writer.reason(clean), None)


# -- names of values: each has a number, and belongs to a split


class Names:
    """Assigns numbers to names, from 1 on; 0 means that a name has no number."""

    def __init__(self, gate: Gate, writer: JournalWriter, totals: Totals) -> None:
        self._gate, self._writer, self._totals = gate, writer, totals
        self._numbers: dict[tuple[str, str], int] = {}
        self._named: dict[int, tuple[str, str]] = {}
        # The names of values that we measure ourselves ("readings"). If the user logs a value with
        # the same name, the name belongs to the user from then on.
        self._of_readings: dict[str, int] = {}
        self._texts: dict[str, int] = {}

    def of(self, number: int) -> tuple[str, str]:
        """The name and split with this number."""
        return self._named[number]

    def number(self, name: Any, split: str | None = None, *, of_user: bool = True) -> int:
        """The number of a name; 0 if it is invalid or there is no room.

        *of_user*: False for values that we measure ourselves; they get 0 if the user logs a value
        with that name.
        """
        if not of_user and (known := self._of_readings.get(name)) is not None:
            return known
        try:
            clean = values.text(name, values.LONGEST_NAME)
        except values.Refused as why:
            place = f"name:{type(name).__name__}"
            self._totals.refuse("name", place, f"a value was not recorded: {why}")
            return 0
        key = (clean, values.split_of(clean, split))
        known = self._numbers.get(key)
        if known is not None:
            if not of_user:
                return 0
            if self._of_readings.get(clean) == known:
                del self._of_readings[clean]
            return known
        known = self._gate.write(lambda: self._new(key), -1)
        if known == 0:
            count = len(self._numbers)
            limit = ", the most" if count >= _MOST_NAMES else " (OTEL_DDP_JOURNAL_BYTES)"
            self._totals.refuse(
                "names_full",
                "names",
                f"{values.shown(clean)} and further new names are not recorded: this process has "
                f"logged {count} different ones{limit}",
            )
        elif known > 0 and not of_user:
            self._of_readings[clean] = known
        return max(known, 0)

    def of_text(self, text: str) -> int:
        """The number of a text such as the name of a user's phase; 0 if there is no room."""
        return self._gate.write(lambda: self._text(text), 0)

    def _text(self, text: str) -> int:
        if text not in self._texts and len(self._texts) < _MOST_NAMES:
            self._texts[text] = self._writer.name(text)
        return self._texts.get(text, 0)

    def _new(self, key: tuple[str, str]) -> int:
        # Another thread may have added the name since `number` looked it up.
        known = self._numbers.get(key)
        if known is not None:
            return known
        if len(self._numbers) >= _MOST_NAMES:
            return 0
        number = self._writer.name(*key)
        if number:
            self._numbers[key] = number
            self._named[number] = key
        return number
