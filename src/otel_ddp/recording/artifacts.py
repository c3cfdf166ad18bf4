"""Artifacts: writes down which file or directory went into a run, or came out of it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from otel_ddp.errors import containment
from otel_ddp.journal import layout
from otel_ddp.recording import values
from otel_ddp.recording.recorder import Recorder
from otel_ddp.recording.secrets import without_secrets
from otel_ddp.recording.spans import open_span

DIRECTIONS = ("output", "input")
_LONGEST_URI = 4000
# All of them in one record, which the smallest ring takes.
_MOST_METADATA, _LONGEST_METADATA = 32, 200


def record_artifact(
    recorder: Recorder, path: Any, name: Any, kind: Any, direction: Any, metadata: Any
) -> None:
    """Records where it lies. Nothing here looks at the file: that may take as long as its server.

    Raises `Refused` for what is no path, no name or no direction.
    """
    if direction not in DIRECTIONS:
        shown = values.shown(direction)
        raise values.Refused(f'the direction must be "output" or "input", got {shown}')
    uri = _uri(path)
    clean, _ = values.text(_last_part(uri) if name is None else name, 200)
    kind, _ = values.text(kind, 100)
    span_id, trace = open_span(recorder)
    if not trace:
        span_id, trace = recorder.run_span["id"], recorder.run_span["trace"]
    more = metadata if isinstance(metadata, Mapping) else {}
    if more is not metadata and metadata is not None:
        shown = values.shown(metadata)
        recorder.refuse("value", "metadata", f"metadata must be a mapping, got {shown}")
    content = {
        "name": clean,
        "type": kind,
        "direction": direction,
        "uri": uri,
        "time": time.time_ns(),
        "step": recorder.current_step(),
        "span": span_id,
        "trace": trace,
        "metadata": values.attributes(
            more, _LONGEST_METADATA, _MOST_METADATA, recorder.hidden_names
        ),
    }
    recorder.append(layout.ARTIFACT, content)


def _uri(path: Any) -> str:
    """The address: of a path its full name, whose odd bytes a journal would not keep."""
    word = containment.attempt(lambda: os.fsdecode(os.fspath(path)), "")
    if "://" in word and not word.startswith("file:///"):
        uri = without_secrets(word[:_LONGEST_URI])
    else:
        if word.startswith("file:///"):
            word = unquote(word.removeprefix("file://"))
        # A working directory may be gone.
        full = containment.attempt(lambda: os.path.abspath(word), "") if word else ""
        uri = f"file://{quote(os.fsencode(full))}" if full else ""
    if not 0 < len(uri) <= _LONGEST_URI:
        raise values.Refused(f"a path or an address was expected, got {values.shown(path)}")
    return uri


def _last_part(uri: str) -> str:
    address = uri if uri.startswith("file:///") else uri.partition("?")[0]
    return unquote(address.rstrip("/").rpartition("/")[2]) or address
