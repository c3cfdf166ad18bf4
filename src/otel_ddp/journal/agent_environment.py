"""The variables of an agent, and a digest of them: a changed digest calls for another agent."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from hashlib import blake2s
from pathlib import Path

_BEGINNINGS = (
    *("OTEL_EXPORTER_", "OTEL_METRIC", "OTEL_METRICS_", "OTEL_TRACES_", "OTEL_LOGS_"),
    *("OTEL_RESOURCE_ATTRIBUTES", "OTEL_SERVICE_NAME"),
    *("OTEL_DDP_LINGER_S", "OTEL_DDP_NODE", "OTEL_DDP_SPOOL_", "OTEL_DDP_SOURCES"),
    *("OTEL_DDP_STALL_TIMEOUT_S", "OTEL_DDP_POSTMORTEM_DIR", "OTEL_DDP_GRAFANA_URL"),
    *("OTEL_DDP_HISTORY_DIR", "OTEL_DDP_HISTORY_BYTES"),
    *("OTEL_DDP_ARTIFACTS", "OTEL_DDP_ARTIFACT_ROOTS", "OTEL_DDP_ARTIFACT_RATE"),
)
_FILES = re.compile(
    r"OTEL_EXPORTER_OTLP_((METRICS|TRACES|LOGS)_)?(CERTIFICATE|CLIENT_CERTIFICATE|CLIENT_KEY)"
    r"|OTEL_DDP_(SPOOL|POSTMORTEM|HISTORY)_DIR"
)


def for_agent(env: Mapping[str, str]) -> dict[str, str]:
    """The variables for an agent. Its working directory is another, so files get full names.

    A name that begins with `~` stays: the settings expand it.
    """
    return {key: _full(text) if _FILES.fullmatch(key) else text for key, text in env.items()}


def _full(text: str) -> str:
    name = text.strip()
    return (
        text if not name or name.startswith(("/", "~")) else str(Path(_initial_directory(), name))
    )


@functools.cache
def _initial_directory() -> str:
    """The first working directory: a training may change it, and still mean the same files."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def digest(env: Mapping[str, str], *, offline: bool) -> str:
    """A digest of the variables that an agent goes by, since these may hold tokens."""
    variables = sorted(
        (key, text) for key, text in for_agent(env).items() if key.startswith(_BEGINNINGS)
    )
    # OTEL_DDP_NODE_RANK is a process's own.
    kept = [(key, value) for key, value in variables if key != "OTEL_DDP_NODE_RANK"]
    content = repr((kept, offline)).encode("utf-8", "replace")
    return blake2s(content, digest_size=8).hexdigest()
