"""Makes of a checkpoint's span a line for the log, where people look for what happened."""

from __future__ import annotations

from otel_ddp.journal.layout import EVENT, SPAN
from otel_ddp.journal.reader import Document

NAME = "training.checkpoint"


def event_of(document: Document) -> Document | None:
    """The event that a checkpoint was saved, or was not; None for any other document."""
    span = document.content
    if document.kind != SPAN or span.get("name") != "checkpoint":
        return None
    try:
        took_s = (int(span["end"]) - int(span["start"])) / 1e9
    except (KeyError, TypeError, ValueError, OverflowError):
        return None  # a record of another version
    error = str(span.get("error") or "")
    body = f"checkpoint failed after {took_s:.1f} s: {error}" if error else ""
    content = {
        "name": NAME,
        "time": span["end"],
        "step": span.get("step"),
        "span": span.get("id"),
        "trace": span.get("trace"),
        "body": body or f"checkpoint saved in {took_s:.1f} s",
        "severity": "WARN" if error else "INFO",
        "attributes": {"duration_s": took_s},
        "exception": span.get("exception"),
    }
    return Document(EVENT, content, document.position)
