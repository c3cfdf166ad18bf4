"""What became of a request, in words for people and in kinds for the delivery."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

Signal = Literal["metrics", "traces", "logs"]
SIGNALS: tuple[Signal, ...] = ("metrics", "traces", "logs")


def wanted(env: Mapping[str, str]) -> tuple[Signal, ...]:
    """The signals that are to be exported: standard variables switch each off by itself."""
    return tuple(
        each
        for each in SIGNALS
        if env.get(f"OTEL_{each.upper()}_EXPORTER", "").strip().lower() != "none"
    )


@dataclass(frozen=True)
class Outcome:
    """How one attempt to send went."""

    kind: Literal["delivered", "retry", "refused"]
    """`retry`: worth keeping for later. `refused`: the same bytes would be refused again."""
    why: str
    """One short line, without any credentials."""
    retry_after_s: float | None = None
    rejected: int = 0
    """Points, spans or records that the collector dropped although it took the request."""


def shown(url: str, path: bool = False) -> str:
    """An address as it may be shown: credentials in it are left out."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "the endpoint"
    if not parts.netloc:
        return url.split("?")[0].rpartition("@")[2]
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path if path else ''}"


def said(text: str, limit: int = 200) -> str:
    """What a collector wrote, fit for one line of a log."""
    words = " ".join("".join(c if c.isprintable() else " " for c in text[: 4 * limit]).split())
    return words if len(words) <= limit else words[:limit] + "…"


def accepted(where: str, rejected: int, message: str) -> Outcome:
    """The collector took the request; it may have dropped some of what was in it."""
    why = f"accepted by {where}"
    if rejected > 0:
        why += f", which dropped {rejected} of it"
    if message:
        why += f": {said(message)}"
    return Outcome("delivered", why, rejected=max(rejected, 0))
