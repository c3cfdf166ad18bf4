"""Spans and events: which span is open in this context, and how they are recorded."""

from __future__ import annotations

import contextvars
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from otel_ddp.journal import layout, trace_ids
from otel_ddp.recording import trace_context, values
from otel_ddp.recording.recorder import Recorder
from otel_ddp.recording.trace_context import SpanContext


class _Open(NamedTuple):
    """The span of ours that is open in a context."""

    journal: bytes
    span_id: str
    trace: str
    of_user: SpanContext | None
    """The user's span around it: another one is inside it."""


_NONE = _Open(b"", "", "", None)
_open_here: contextvars.ContextVar[_Open] = contextvars.ContextVar("otel_ddp_span", default=_NONE)


def _users_span() -> SpanContext | None:
    """The user's span that is open here, unless it stands for the innermost one of ours."""
    found = trace_context.current()
    ours = found is not None and found.span_id == _open_here.get().span_id
    return None if ours else found


def run_facts(env: Mapping[str, str]) -> dict[str, str]:
    """The span of a run in one process: the agent makes it, from these facts, when it ends."""
    around = _users_span() or trace_context.of_environment(env)
    trace_id = os.urandom(16).hex() if around is None else around.trace_id
    return {
        "id": os.urandom(8).hex(),
        "trace": trace_ids.trace_by_id(trace_id),
        "parent": "" if around is None else around.span_id,
    }


def open_span(recorder: Recorder) -> tuple[str, str]:
    """The id and the trace of the innermost span that is open here, be it ours or the user's."""
    found = _open_here.get()
    # A span of a run that has ended contains no span of the next run.
    ours = found if found.journal == recorder.writer.journal_id else _NONE
    of_user = _users_span()
    if of_user is not None and of_user != ours.of_user:
        return of_user.span_id, trace_ids.trace_by_id(of_user.trace_id)
    return ours.span_id, ours.trace


class OpenSpan:
    """A span, from its beginning to its end."""

    __slots__ = (
        *("_began", "_detach", "_name", "_parent", "_span_id", "_started_ns"),
        *("_step", "_token", "_trace"),
    )

    def __init__(
        self, recorder: Recorder, name: Any, trace: str, step: int | None, run: str = ""
    ) -> None:
        """*trace*: that of the step; empty outside of steps. *run*: the run's name, where it is
        final and this process's spans are exported: the user's own spans become ours' children."""
        self._name, _ = values.text(name, 200)
        self._step = step
        self._parent, self._trace = open_span(recorder)
        if not self._trace:
            self._trace = trace
            if not trace:
                self._parent, self._trace = recorder.run_span["id"], recorder.run_span["trace"]
        self._span_id, beside = os.urandom(8).hex(), _users_span()
        self._detach: Callable[[], None] | None = None
        if run:
            trace_id = trace_ids.trace_id(run, self._trace).hex()
            self._detach = trace_context.attach(SpanContext(trace_id, self._span_id))
        # Where ours is not attached, the user's span that is open now stays around it.
        here = _Open(recorder.writer.journal_id, self._span_id, self._trace, beside)
        self._token = _open_here.set(here)
        self._started_ns, self._began = time.time_ns(), time.perf_counter()

    def leave(self) -> float:
        """Ends the span; returns its duration in seconds."""
        took_s = time.perf_counter() - self._began
        try:
            _open_here.reset(self._token)
        except ValueError:
            # A generator may be closed in another context than the one it was opened in.
            return took_s
        if self._detach is not None:
            self._detach()
        return took_s

    def record(
        self,
        recorder: Recorder,
        took_s: float,
        attributes: Mapping[str, Any],
        raised: BaseException | None,
    ) -> None:
        """Records the span, which has ended, and with what exception."""
        content = {
            "name": self._name,
            "id": self._span_id,
            "parent": self._parent,
            "trace": self._trace,
            "start": self._started_ns,
            "end": self._started_ns + int(took_s * 1e9),
            "step": self._step,
            "error": "" if raised is None else values.error_line(raised),
            "attributes": values.attributes(attributes, hidden=recorder.hidden_names),
        }
        if raised is not None:
            content["exception"] = values.exception_names(raised)
        recorder.append(layout.SPAN, content)


def record_event(recorder: Recorder, name: Any, attributes: Mapping[str, Any]) -> None:
    """Records that something happened now, in the span that is open in this context."""
    clean, _ = values.text(name, 200)
    span_id, trace = open_span(recorder)
    content = {
        "name": clean,
        "time": time.time_ns(),
        "step": recorder.current_step(),
        "span": span_id,
        "trace": trace,
        "attributes": values.attributes(attributes, hidden=recorder.hidden_names),
    }
    recorder.append(layout.EVENT, content)
