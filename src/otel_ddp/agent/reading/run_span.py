"""Makes the span of a whole run in one process, once the process has ended."""

from __future__ import annotations

from typing import Any

from otel_ddp.journal.reader import JournalReader
from otel_ddp.words import STATES, state_word


def context(reader: JournalReader) -> tuple[str, str] | None:
    """The trace and the id of this span, which are known from the beginning."""
    known = reader.facts.get("span")
    if not isinstance(known, dict) or not (known.get("trace") and known.get("id")):
        return None
    return str(known["trace"]), str(known["id"])


def run_span(reader: JournalReader, state: int, gone_ns: int) -> dict[str, Any] | None:
    """The span, as content of a document; *gone_ns*: when a killed process was found dead."""
    if (ids := context(reader)) is None:
        return None
    trace, span_id = ids
    progress, reason = reader.progress(), reader.reason()
    ended_ns = gone_ns
    if progress is not None and state != STATES["killed"]:
        ended_ns = progress.state_since_ns
    failed = state != STATES["finished"]
    return {
        "name": "run",
        "id": span_id,
        "parent": str(reader.facts["span"].get("parent") or ""),
        "trace": trace,
        "start": reader.created_ns,
        "end": max(ended_ns, reader.created_ns),
        "step": None if progress is None else progress.step,
        "error": (reason or state_word(state)) if failed else "",
        "attributes": {"state": state_word(state)},
    }
