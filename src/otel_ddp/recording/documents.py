"""What a process says of itself: its identity, facts and configuration, its spans and events."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from otel_ddp.journal import layout
from otel_ddp.journal.gate import Gate
from otel_ddp.journal.writer import JournalWriter
from otel_ddp.recording import values
from otel_ddp.recording.secrets import without_secrets
from otel_ddp.recording.totals import Totals

_LONGEST_REASON = 4000
# Of a stream in one record; the smallest ring takes a record of 18 kB.
_MOST_WORDS = 1000


class Documents:
    """Written when it changes; only what is new is written."""

    def __init__(
        self, gate: Gate, writer: JournalWriter, totals: Totals, hidden_names: Collection[str]
    ) -> None:
        self._gate, self._writer, self._totals = gate, writer, totals
        self.hidden_names = hidden_names
        """Names of the user's whose values are not recorded."""
        self._identity: Mapping[str, Any] = {}
        self._config: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}

    def identity(self, content: Mapping[str, Any]) -> bool | None:
        """Writes the identity; False if it found no room, None if this call interrupted a write."""
        written: bool | None = self._gate.write(partial(self._identify, content), None)
        return written

    def _identify(self, content: Mapping[str, Any]) -> bool:
        # Several threads may find out at once.
        if content != self._identity and not self._writer.document(layout.IDENTITY, content):
            return False
        self._identity = content
        return True

    def facts(self, content: Mapping[str, Any]) -> None:
        """Adds facts about this program."""
        new = {key: value for key, value in content.items() if self._facts.get(key) != value}
        if not new:
            return
        written = self._gate.write(partial(self._writer.document, layout.FACTS, new), None)
        if written:
            self._facts.update(new)
        elif written is not None:
            text = "what is known of this program found no room (OTEL_DDP_JOURNAL_BYTES)"
            self._totals.refuse("value", "facts", text)

    def config(self, content: Mapping[str, Any]) -> list[str]:
        """Records the new settings of a configuration; returns the names that found no room."""
        known, none = self._config, object()
        new = {key: value for key, value in content.items() if known.get(key, none) != value}
        left, size = list(new), len(new)
        # As many as find room, in their order.
        while left and size:
            part = {key: new[key] for key in left[:size]}
            if self._gate.write(partial(self._configure, part), False):
                del left[:size]
            else:
                size //= 2
        return left

    def _configure(self, new: Mapping[str, Any]) -> bool:
        if not self._writer.document(layout.CONFIG, new):
            return False
        self._config.update(new)
        return True

    def append(self, kind: int, content: Mapping[str, Any]) -> None:
        """Records a span, an event or an artifact."""
        payload = json.dumps(content, separators=(",", ":")).encode()
        if not self._gate.write(lambda: self._writer.append(kind, payload), True):
            shown = values.shown(content.get("name"))
            self._totals.refuse("value", "record", f"{shown} was not recorded: it is too large")

    def append_words(self, kind: int, before: int, words: Sequence[int]) -> None:
        """Appends words to a stream; *before* is the number of its earlier words."""
        for at in range(0, len(words), _MOST_WORDS):
            piece = words[at : at + _MOST_WORDS]
            payload = struct.pack(f"<{len(piece) + 1}Q", before + at, *piece)
            self._gate.write(partial(self._writer.append, kind, payload), False)

    def reason(self, text: str) -> None:
        """Says why the run ended."""
        clean = without_secrets(text[:_LONGEST_REASON])
        self._gate.write(lambda: self._writer.reason(clean), None)
