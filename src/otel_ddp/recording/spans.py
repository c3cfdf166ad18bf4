"""Spans and events: which span is open in this context, and how they are recorded."""

from __future__ import annotations

import contextlib
import contextvars
import os
import time
from collections.abc import Mapping
from typing import Any

from otel_ddp.journal import layout
from otel_ddp.recording import values
from otel_ddp.recording.recorder import Recorder

# Of the span that is open in this context: its journal, its id and the name of its trace.
_open_here: contextvars.ContextVar[tuple[bytes, str, str]] = contextvars.ContextVar(
    "otel_ddp_span", default=(b"", "", "")
)


def _open_span(recorder: Recorder) -> tuple[str, str]:
    journal, span_id, trace = _open_here.get()
    # A span of a run that has ended contains no span of the next run.
    return (span_id, trace) if journal == recorder.writer.journal_id else ("", "")


class OpenSpan:
    """A span, from its beginning to its end."""

    __slots__ = (
        *("_began", "_name", "_parent", "_span_id", "_started_ns"),
        *("_step", "_token", "_trace"),
    )

    def __init__(self, recorder: Recorder, name: Any, trace: str, step: int | None) -> None:
        self._name, _ = values.text(name, 200)
        self._step = step
        self._parent, around = _open_span(recorder)
        # All ranks give the trace of a step the same name, so it is one trace.
        self._trace = around or trace
        self._span_id = os.urandom(8).hex()
        self._token = _open_here.set((recorder.writer.journal_id, self._span_id, self._trace))
        self._started_ns, self._began = time.time_ns(), time.perf_counter()

    def leave(self) -> float:
        """Ends the span; returns its duration in seconds."""
        took_s = time.perf_counter() - self._began
        # A generator may be closed in another context than the one it was opened in.
        with contextlib.suppress(ValueError):
            _open_here.reset(self._token)
        return took_s

    def record(
        self, recorder: Recorder, took_s: float, attributes: Mapping[str, Any], error: str
    ) -> None:
        """Records the span, which has ended."""
        content = {
            "name": self._name,
            "id": self._span_id,
            "parent": self._parent,
            "trace": self._trace,
            "start": self._started_ns,
            "end": self._started_ns + int(took_s * 1e9),
            "step": self._step,
            "error": error,
            "attributes": values.attributes(attributes, hidden=recorder.hidden_names),
        }
        recorder.append(layout.SPAN, content)


def record_event(recorder: Recorder, name: Any, attributes: Mapping[str, Any]) -> None:
    """Records that something happened now, in the span that is open in this context."""
    clean, _ = values.text(name, 200)
    span_id, trace = _open_span(recorder)
    content = {
        "name": clean,
        "time": time.time_ns(),
        "step": recorder.current_step(),
        "span": span_id,
        "trace": trace,
        "attributes": values.attributes(attributes, hidden=recorder.hidden_names),
    }
    recorder.append(layout.EVENT, content)
