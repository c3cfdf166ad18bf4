"""Names of traces, and the ids that each process and agent derives from a name alike."""

from __future__ import annotations

import re
from hashlib import blake2s

_KNOWN_ID = re.compile("id/([0-9a-f]{32})")


def trace_of_step(step: int) -> str:
    """The trace of a step of all ranks: their hooks count alike."""
    return f"step/{step}"


def is_of_step(trace: str) -> bool:
    """Whether all ranks have spans in this trace."""
    return trace.startswith("step/")


def trace_by_id(trace_id: str) -> str:
    """The trace with this id, in hexadecimal digits: a process's own, or one of the user's."""
    return f"id/{trace_id}"


def trace_id(run: str, trace: str) -> bytes:
    """The id of a trace of a run."""
    known = _KNOWN_ID.fullmatch(trace)
    return bytes.fromhex(known[1]) if known else _digest(f"{run}/{trace}", 16)


def first_span_id(run: str, trace: str) -> bytes:
    """The id of the span above those of all ranks, in the trace of a step."""
    return _digest(f"{run}/{trace}/first", 8)


def _digest(text: str, size: int) -> bytes:
    return blake2s(text.encode("utf-8", "replace"), digest_size=size).digest()
