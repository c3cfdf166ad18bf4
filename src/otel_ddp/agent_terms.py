"""What an agent is started with: who was started with other terms wants another agent."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2s

_BEGINNINGS = (
    *("OTEL_EXPORTER_", "OTEL_METRIC", "OTEL_METRICS_", "OTEL_TRACES_", "OTEL_LOGS_"),
    *("OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"),
    *("OTEL_DDP_LINGER_S", "OTEL_DDP_NODE", "OTEL_DDP_SPOOL_", "OTEL_DDP_SOURCES"),
    *("OTEL_DDP_STALL_TIMEOUT_S", "OTEL_DDP_POSTMORTEM_DIR"),
)


def terms(env: Mapping[str, str]) -> str:
    """A digest of the variables that an agent goes by: tokens among them are not told."""
    said = sorted((key, value) for key, value in env.items() if key.startswith(_BEGINNINGS))
    # OTEL_DDP_NODE_RANK is a process's own.
    kept = [(key, value) for key, value in said if key != "OTEL_DDP_NODE_RANK"]
    return blake2s(repr(kept).encode("utf-8", "replace"), digest_size=8).hexdigest()
