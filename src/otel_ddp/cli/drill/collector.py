"""Checks that a collector takes what the agent of a drill will send."""

from __future__ import annotations

import os
from collections.abc import Mapping

from otel_ddp import settings
from otel_ddp.agent.export.otlp.outcome import exported_signals
from otel_ddp.errors import ConfigError


def collector(env: Mapping[str, str] = os.environ) -> tuple[bool, str]:
    """Whether there is one that does; and where, or why not."""
    # Imported here: it takes long.
    from otel_ddp.agent.export.otlp.transport import Transport, why_none, with_endpoint

    if "metrics" not in exported_signals(env):
        return False, "OTEL_METRICS_EXPORTER=none: nothing is sent; unset it for the drill"
    try:
        # Not the trainings' setting, which may be offline: a drill sends.
        conf = with_endpoint(settings.read(env, agent="auto"), env)
    except ConfigError as error:
        return False, str(error)
    if conf is None:
        return False, f"{why_none()}: set OTEL_EXPORTER_OTLP_ENDPOINT"
    transport = Transport(conf, env)
    try:
        # An empty body is a request with nothing in it.
        outcome = transport.send("metrics", b"")
        if outcome.kind == "delivered":
            return True, f"{transport.destination} accepts metrics"
        return False, f"{outcome.why}; `otel-ddp doctor` says what to do"
    finally:
        transport.close()
