"""Hands requests of an HTTP server to the page, and tells it who asks."""

from __future__ import annotations

from typing import Any

from otel_ddp.agent.node import socket_owners
from otel_ddp.agent.scrape.handler import Handler
from otel_ddp.agent.scrape.web_config import WebConfig
from otel_ddp.history.page.app import App
from otel_ddp.history.page.exchange import Answer


def page_answer(handler: Handler, app: App, rules: WebConfig | None) -> Answer:
    """The answer to a request that the endpoint has admitted. *rules*: as the endpoint's."""
    has_named_itself = rules is not None and rules.asks_for_names()
    known: list[bool] = []

    def is_private() -> bool:
        if not known:
            known.append(has_named_itself or is_own_connection(handler.connection))
        return known[0]

    return app.answer(
        handler.command,
        handler.path,
        {name.lower(): value for name, value in handler.headers.items()},
        is_private,
    )


def is_own_connection(connection: Any) -> bool:
    """Whether our own user or root has opened this connection on this node."""
    try:
        peer, own = connection.getpeername(), connection.getsockname()
    except OSError:
        return False
    return socket_owners.is_own(peer[:2], own[:2])
