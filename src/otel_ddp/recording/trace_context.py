"""Where the user's own spans and ours meet, if the program uses OpenTelemetry; no import of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from otel_ddp import settings
from otel_ddp.errors import containment


class SpanContext(NamedTuple):
    """A span by its ids, in hexadecimal digits."""

    trace_id: str
    span_id: str


def current() -> SpanContext | None:
    """The user's span that is open here; None if there is none, or if it is not recorded."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    return containment.attempt(_current, None)


def _current() -> SpanContext | None:
    context = sys.modules["opentelemetry.trace"].get_current_span().get_span_context()
    # One that is not sampled never arrives: what lies below it would have no parent.
    if not (context.is_valid and context.trace_flags.sampled):
        return None
    return SpanContext(f"{context.trace_id:032x}", f"{context.span_id:016x}")


def of_environment(env: Mapping[str, str]) -> SpanContext | None:
    """The span that the launcher names in TRACEPARENT."""
    found = settings.value("TRACEPARENT", env)
    if found is None:
        return None
    _, trace_id, span_id, flags = found.split("-")[:4]
    # One that is not sampled never arrives.
    return SpanContext(trace_id, span_id) if int(flags, 16) & 1 else None


def attach(ours: SpanContext) -> Callable[[], None] | None:
    """Let the user's next spans be below this one; what is returned ends that."""
    if "opentelemetry.trace" not in sys.modules:
        return None
    return containment.attempt(lambda: _attach(ours), None)


def _attach(ours: SpanContext) -> Callable[[], None]:
    trace: Any = sys.modules["opentelemetry.trace"]
    context: Any = sys.modules["opentelemetry.context"]
    flags = trace.TraceFlags(trace.TraceFlags.SAMPLED)
    ids = (int(ours.trace_id, 16), int(ours.span_id, 16))
    span = trace.NonRecordingSpan(trace.SpanContext(*ids, is_remote=False, trace_flags=flags))
    token = context.attach(trace.set_span_in_context(span))
    return lambda: containment.attempt(lambda: context.detach(token), None)
