"""Encodes and sends the OpenTelemetry protocol: what is sent, and what comes of an attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from otel_ddp.settings import value

Signal = Literal["metrics", "traces", "logs"]
SIGNALS: tuple[Signal, ...] = ("metrics", "traces", "logs")

# Gateways mostly refuse more than 1 MiB (nginx) or 4 MiB (gRPC) at once.
MOST_BYTES = 900 * 1024
# A collector that asks for a longer pause is tried again after this one.
RETRY_AFTER_LIMIT_S = 60.0


def exported_signals(env: Mapping[str, str]) -> tuple[Signal, ...]:
    """The signals that are exported: a standard variable switches each of them off."""
    return tuple(each for each in SIGNALS if value(f"OTEL_{each.upper()}_EXPORTER", env) != "none")


@dataclass(frozen=True)
class Request:
    """One OTLP request, ready to be sent."""

    signal: Signal
    body: bytes
    points: int
    irreplaceable: bool = True
    """Whether it holds what is sent only once: logged values, spans, events. A request with
    current values alone is replaced by the next export, so it is dropped first."""
    oldest_s: int = 0
    """When the oldest point in it was measured, in seconds; 0: not known."""


@dataclass(frozen=True)
class Outcome:
    """How one attempt to send went."""

    kind: Literal["delivered", "retry", "refused"]
    """`retry`: kept for later, because people can mend the cause. `refused`: the receiver says that
    these bytes are wrong."""
    why: str
    """One short line, without any credentials."""
    retry_after_s: float | None = None
    too_large: bool = False
    """Refused for its size: a part of it may be accepted."""
    doubtful: bool = False
    """To be tried again, but the cause may be this request: a receiver that fails over it."""
    rejected: int = 0
    """Points, spans or records that the collector dropped out of a request that it accepted."""


def accepted(where: str, rejected: int, message: str) -> Outcome:
    """The collector accepted the request; it may have dropped some of the content."""
    why = f"{where} accepted the rest" if rejected > 0 else f"accepted by {where}"
    if message:
        why += f": {one_line(message)}"
    return Outcome("delivered", why, rejected=max(rejected, 0))


def one_line(text: str, limit: int = 200) -> str:
    """What a collector wrote, made fit for one line of a log."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return words if len(words) <= limit else words[:limit] + "…"
