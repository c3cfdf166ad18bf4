"""The log records and the span of an artifact."""

from __future__ import annotations

from hashlib import blake2s
from typing import Any

from otel_ddp.agent.artifacts.artifact import COMPLETE, WAITING, Artifact
from otel_ddp.catalog import ARTIFACT_EVENT
from otel_ddp.journal.layout import EVENT, SPAN
from otel_ddp.journal.reader import Document


def record(artifact: Artifact) -> Document:
    """What is known now, as a log record: once it is told of, and once it is done with."""
    told, state = artifact.told, artifact.state
    failed = state not in (WAITING, COMPLETE)
    body = f"{told.direction} {told.name} ({told.type})"
    if artifact.size is not None:
        body += f", {artifact.size} bytes"
    body += f": {artifact.uri}"
    if artifact.problem:
        body += f": {artifact.problem}"
    content = {
        "name": ARTIFACT_EVENT,
        "time": artifact.done_ns or told.time_ns,
        "body": body,
        "severity": "WARN" if failed else "INFO",
        "step": told.step,
        "span": told.span,
        "trace": told.trace,
        "attributes": _attributes(artifact),
    }
    return Document(EVENT, content, 0)


def span(artifact: Artifact) -> Document:
    """The time that the agent took to read and to store it, below the span it was told of in."""
    told = artifact.told
    content = {
        "name": ARTIFACT_EVENT,
        "id": blake2s(artifact.key.encode("utf-8", "replace"), digest_size=8).hexdigest(),
        "parent": told.span,
        "trace": told.trace,
        "start": artifact.began_ns,
        "end": artifact.done_ns,
        "step": told.step,
        "error": artifact.problem,
        "attributes": _attributes(artifact),
    }
    return Document(SPAN, content, 0)


def _attributes(artifact: Artifact) -> dict[str, Any]:
    told = artifact.told
    found: dict[str, Any] = {
        "artifact.name": told.name,
        "artifact.type": told.type,
        "artifact.direction": told.direction,
        "artifact.uri": artifact.uri,
        "artifact.state": artifact.state,
    }
    if artifact.size is not None:
        found["artifact.size"] = artifact.size
        found["artifact.digest"] = f"sha256:{artifact.digest}"
    if artifact.stored_uri:
        found["artifact.origin"] = told.uri
    if artifact.problem:
        found["artifact.problem"] = artifact.problem
    # A journal may hold anything.
    return {
        **{
            f"artifact.metadata.{key}": value
            for key, value in told.metadata.items()
            if isinstance(value, (str, bool, int, float))
        },
        **found,
    }
