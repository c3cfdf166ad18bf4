"""Hands requests of an HTTP server to the page, and tells it who asks."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from typing import Any

from otel_ddp.agent.node import socket_owners
from otel_ddp.agent.scrape.web_config import WebConfig
from otel_ddp.history.page.app import App


def answer_page(handler: BaseHTTPRequestHandler, app: App, rules: WebConfig | None) -> None:
    """Answer one request that the endpoint has admitted. *rules*: as the endpoint's."""
    has_named_itself = rules is not None and rules.asks_for_names()
    known: list[bool] = []

    def is_private() -> bool:
        if not known:
            known.append(has_named_itself or is_own_connection(handler.connection))
        return known[0]

    given = app.answer(
        handler.command,
        handler.path,
        {name.lower(): value for name, value in handler.headers.items()},
        is_private,
        any_host=has_named_itself,
    )
    handler.send_response(given.status)
    for name, value in given.headers.items():
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(given.body)))
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(given.body)


def is_own_connection(connection: Any) -> bool:
    """Whether our own user or root has opened this connection on this node."""
    try:
        peer, own = connection.getpeername(), connection.getsockname()
    except OSError:
        return False
    return socket_owners.is_own(peer[:2], own[:2])
