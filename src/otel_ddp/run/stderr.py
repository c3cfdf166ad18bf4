"""Says something on stderr without ever waiting for who reads it."""

from __future__ import annotations

import contextlib
import select
import sys
from typing import Any

from otel_ddp.history.quantities import printable

# What a pipe takes at once: more could wait for its reader.
_MOST_BYTES = 4096


def say(text: str) -> None:
    """Write it, or nothing where a full pipe would hold the process."""
    stream = sys.stderr
    if stream is None:
        return
    encoding = getattr(stream, "encoding", None) or "utf-8"
    # A name may hold control codes, or letters that turn the line around: a terminal obeys them.
    clean = "\n".join(map(printable, text.split("\n")))
    encoded = clean.encode(encoding, "replace")[:_MOST_BYTES]
    # It may be closed, or a pipe that nobody reads any more.
    with contextlib.suppress(OSError, ValueError):
        if _takes_at_once(stream):
            stream.write(encoded.decode(encoding, "ignore"))
            stream.flush()


def _takes_at_once(stream: Any) -> bool:
    try:
        fd = stream.fileno()
    except (AttributeError, OSError, ValueError):
        return True  # a notebook's, or one in memory
    return bool(select.select([], [fd], [], 0)[1])
