"""An endpoint that is served while a test looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.serve.endpoint import Endpoint
from otel_ddp.history.page.app import App


@contextmanager
def serving(
    ledger: Ledger | None = None,
    host: str = "127.0.0.1",
    histories: Path = Path("/nowhere"),
    **how: Any,
) -> Iterator[Endpoint]:
    """Of no series, on any port of loopback, with the page of no run, unless the test says so."""
    endpoint = Endpoint(ledger or Ledger(), host, 0, App(histories), **how)
    endpoint.start()
    try:
        yield endpoint
    finally:
        endpoint.stop()
