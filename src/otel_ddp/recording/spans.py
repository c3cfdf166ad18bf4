"""Records spans, events, exceptions and artifacts, each within the span that is then open."""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from otel_ddp import errors, settings
from otel_ddp.journal import layout
from otel_ddp.recording import values
from otel_ddp.recording.progress import Phase, Progress
from otel_ddp.recording.recorder import Recorder
from otel_ddp.recording.secrets import without_secrets
from otel_ddp.vocabulary import catalog

DIRECTIONS = ("output", "input")
_LONGEST_URI = 4000
# Limits of an artifact's metadata, so that it fits into one record of the smallest ring.
_MOST_METADATA, _LONGEST_METADATA = 32, 200


# -- the user's spans, if the program uses OpenTelemetry, which we never import ourselves


class SpanContext(NamedTuple):
    """The ids of a span in hexadecimal."""

    trace_id: str
    span_id: str


def _read_current() -> SpanContext | None:
    context = sys.modules["opentelemetry.trace"].get_current_span().get_span_context()
    # An unsampled span is never exported. A child of it would lack its parent, so ignore it.
    if not (context.is_valid and context.trace_flags.sampled):
        return None
    return SpanContext(f"{context.trace_id:032x}", f"{context.span_id:016x}")


def _of_environment(env: Mapping[str, str]) -> SpanContext | None:
    """The span that the launcher set in the environment variable TRACEPARENT."""
    found = settings.value("TRACEPARENT", env)
    if found is None:
        return None
    _, trace_id, span_id, flags = found.split("-")[:4]
    # An unsampled span is never exported, so it cannot serve as a parent.
    return SpanContext(trace_id, span_id) if int(flags, 16) & 1 else None


def _attached(ours: SpanContext) -> Callable[[], None]:
    """Make our span the parent of the spans that the user opens next. Returns a function that
    undoes this."""
    trace: Any = sys.modules["opentelemetry.trace"]
    context: Any = sys.modules["opentelemetry.context"]
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    ids = (int(ours.trace_id, 16), int(ours.span_id, 16))
    span = trace.NonRecordingSpan(trace.SpanContext(*ids, is_remote=False, trace_flags=flags))
    token = context.attach(trace.set_span_in_context(span))
    return lambda: errors.attempt(lambda: context.detach(token), None)


# -- our spans and events


class _Open(NamedTuple):
    """The innermost open span of otel_ddp in a context."""

    journal: bytes
    span_id: str
    trace: str
    of_user: SpanContext | None
    """The user's span around ours. Any other current span of the user is inside ours."""


_NONE = _Open(b"", "", "", None)
_open_here: contextvars.ContextVar[_Open] = contextvars.ContextVar("otel_ddp_span", default=_NONE)


def _users_span() -> SpanContext | None:
    """The user's current span; None if there is none, or if it is our own innermost span, attached
    by us."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    found = errors.attempt(_read_current, None)
    ours = found is not None and found.span_id == _open_here.get().span_id
    return None if ours else found


def run_facts(env: Mapping[str, str]) -> dict[str, str]:
    """The ids of the span that covers the run in this process. The agent exports this span at the
    end."""
    around = _users_span() or _of_environment(env)
    trace_id = os.urandom(16).hex() if around is None else around.trace_id
    return {
        "id": os.urandom(8).hex(),
        "trace": layout.trace_by_id(trace_id),
        "parent": "" if around is None else around.span_id,
    }


def moment(recorder: Recorder) -> dict[str, Any]:
    """Where an event belongs that happens now: the innermost open span (ours or the user's), its
    trace, and the step.

    Outside of spans, the trace is that of the step, and before the first step that of the run.
    """
    found = _open_here.get()
    # Ignore a span that was opened in an earlier run of this process and is still open: it does not
    # contain spans of this run.
    ours = found if found.journal == recorder.writer.journal_id else _NONE
    span_id, trace = ours.span_id, ours.trace
    of_user = _users_span()
    if of_user is not None and of_user != ours.of_user:
        span_id, trace = of_user.span_id, layout.trace_by_id(of_user.trace_id)
    of_step, step = recorder.steps.trace_and_step()
    if not trace and not of_step:
        span_id, trace = recorder.run_span["id"], recorder.run_span["trace"]
    return {"span": span_id, "trace": trace or of_step, "step": step}


class OpenSpan:
    """A span of the user from its start to its end. It may be a phase as well."""

    def __init__(
        self, progress: Progress, name: Any, run: str, *, phase: bool, expect_s: Any
    ) -> None:
        """*run*: the run's name, if it is final and this process exports spans: then the user's
        OpenTelemetry spans become children of this span; else empty.

        Raises `Refused` for an invalid name.
        """
        self.progress, recorder = progress, progress.recorder
        self._name = values.text(name, values.LONGEST_NAME)
        self._phase: Phase | None = None
        if phase:
            expected_s = errors.attempt(lambda: float(expect_s or 0.0), 0.0)
            is_plain = 0.0 <= expected_s < 1e9
            self._phase = progress.begin(self._name, expected_s if is_plain else 0.0)
        self._inside = moment(recorder)
        self._span_id, beside = os.urandom(8).hex(), _users_span()
        trace = self._inside["trace"]
        self._detach: Callable[[], None] | None = None
        if run and "opentelemetry.trace" in sys.modules:
            ours = SpanContext(layout.trace_id(run, trace).hex(), self._span_id)
            self._detach = errors.attempt(lambda: _attached(ours), None)
        # Remember the user's current span, which encloses ours. If ours could not be attached, that
        # span stays current, and must not be taken for one inside ours.
        here = _Open(recorder.writer.journal_id, self._span_id, trace, beside)
        self._token = _open_here.set(here)
        self._started_ns, self._began = time.time_ns(), time.perf_counter()

    def leave(
        self, attributes: Mapping[str, Any], raised: BaseException | None, here: bool
    ) -> None:
        """End the span. *here*: whether this process has opened it; otherwise it is not
        recorded."""
        took_s = time.perf_counter() - self._began
        # `reset` raises ValueError if the span was opened in a generator that is now closed in
        # another context.
        with contextlib.suppress(ValueError):
            _open_here.reset(self._token)
            if self._detach is not None:
                self._detach()
        if not here:
            return
        # End the phase first: it must end even if the span cannot be written.
        if self._phase is not None:
            self.progress.end(self._phase, took_s)
        recorder = self.progress.recorder
        content = {
            "name": self._name,
            "id": self._span_id,
            "parent": self._inside["span"],
            "trace": self._inside["trace"],
            "start": self._started_ns,
            "end": self._started_ns + int(took_s * 1e9),
            "step": self._inside["step"],
            "error": "" if raised is None else values.error_line(raised),
            "attributes": values.attributes(attributes),
        }
        if raised is not None:
            content["exception"] = values.exception_names(raised)
        recorder.documents.append(layout.SPAN, content)


def _happened(recorder: Recorder, name: str, attributes: Mapping[str, Any], **more: Any) -> None:
    """Record an event in the open span."""
    here = {"name": name, "time": time.time_ns(), **moment(recorder)}
    recorder.documents.append(layout.EVENT, {**here, **more, "attributes": attributes})


# The functions below raise `Refused` for invalid arguments.


def record_event(recorder: Recorder, name: Any, attributes: Mapping[str, Any]) -> None:
    """Record a user's event."""
    clean = values.text(name, values.LONGEST_NAME)
    _happened(recorder, clean, values.attributes(attributes))


_LONGEST_TITLE, _LONGEST_TEXT = 200, 1000
_ALERT_LEVELS = ("info", "warn", "error")


def record_alert(recorder: Recorder, title: Any, text: Any, level: Any) -> None:
    """Record an alert that the user's program raises."""
    clean = values.text(title, _LONGEST_TITLE)
    clean, message = without_secrets(clean), str(values.plain(text, _LONGEST_TEXT) or "")
    word = errors.attempt(lambda: str(level).lower(), "")
    if word not in _ALERT_LEVELS:
        wanted = "an alert's level must be info, warn or error"
        recorder.totals.refuse("value", "alert level", f"{wanted}, got {values.shown(level)}")
        word = "info"
    body = f"{clean}: {message}" if message else clean
    attributes = {"title": clean, "text": message, "level": word}
    _happened(recorder, catalog.ALERT_EVENT, attributes, body=body, severity=word.upper())


# -- the exception that ends a run

# Limits in characters of JSON, which are more than those of the text (JSON escapes other scripts),
# so that each record fits into the smallest journal.
_LONGEST_TRACE, _LONGEST_MESSAGE = 8000, 1000
# A traceback with more frames comes from endless recursion.
_MOST_FRAMES = 40


def record_exception(recorder: Recorder, error: BaseException) -> None:
    """Record the exception that ends a run, with its stack trace."""

    def stacktrace() -> str:
        return "".join(traceback.format_exception(error, limit=-_MOST_FRAMES))

    # An exception's `__str__` may raise.
    message = errors.attempt(lambda: str(error), "")
    trace = errors.attempt(stacktrace, type(error).__qualname__)
    attributes = {
        "exception.type": values.exception_names(error)[1],
        "exception.message": _bounded(message, _LONGEST_MESSAGE),
        "exception.stacktrace": _bounded(trace, _LONGEST_TRACE),
    }
    body = _bounded(values.error_line(error), _LONGEST_MESSAGE)
    _happened(recorder, "exception", attributes, body=body, severity="FATAL")


def _bounded(text: str, longest: int) -> str:
    """The text without secrets; of a long text, only the start and the end."""
    if len(text) > 4 * longest:
        # Shorten the text first, as searching megabytes for secrets takes time.
        text = f"{text[: 2 * longest]}\n[...]\n{text[-2 * longest :]}"
    text = without_secrets(text.encode("utf-8", "replace").decode())
    size = len(json.dumps(text))
    if size <= longest:
        return text
    kept = max(1, int(len(text) * longest / size) - 10)
    # The last lines of a stack trace are the most useful ones.
    return f"{text[: kept // 3]}\n[...]\n{text[-(kept - kept // 3) :]}"


# -- artifacts


def record_artifact(
    recorder: Recorder, path: Any, name: Any, kind: Any, direction: Any, metadata: Any
) -> None:
    """Record an artifact's location; its file is not read, as it may be large or remote."""
    if direction not in DIRECTIONS:
        shown = values.shown(direction)
        raise values.Refused(f'the direction must be "output" or "input", got {shown}')
    if not isinstance(metadata, (Mapping, NoneType)):
        raise values.Refused(f"metadata must be a mapping, got {values.shown(metadata)}")
    uri = _uri(path)
    clean = values.text(_last_part(uri) if name is None else name, 200)
    kind = values.text(kind, 100)
    more = values.attributes(metadata or {}, _LONGEST_METADATA, _MOST_METADATA)
    attributes = {
        **{f"artifact.metadata.{key}": value for key, value in more.items()},
        "artifact.name": clean,
        "artifact.type": kind,
        "artifact.direction": direction,
        "artifact.uri": uri,
    }
    body = f"{direction} {clean} ({kind}): {uri}"
    _happened(recorder, catalog.ARTIFACT_EVENT, attributes, body=body)


def _uri(path: Any) -> str:
    """The URI of an artifact; a path becomes an absolute file:// URI, percent-encoded."""
    word = errors.attempt(lambda: os.fsdecode(os.fspath(path)), "")
    if "://" in word:
        uri = without_secrets(word[:_LONGEST_URI])
    else:
        # `abspath` raises if the working directory was deleted.
        full = errors.attempt(lambda: os.path.abspath(word), "") if word else ""
        uri = f"file://{quote(os.fsencode(full))}" if full else ""
    if not 0 < len(uri) <= _LONGEST_URI:
        raise values.Refused(f"a path or an address was expected, got {values.shown(path)}")
    return uri


def _last_part(uri: str) -> str:
    # This removes only a query: a question mark in a path would be percent-encoded.
    address = uri.partition("?")[0]
    return unquote(address.rstrip("/").rpartition("/")[2]) or address
