"""What each server of ours does with a request: the guard looks at it, and one answer is sent."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from typing import Any

from otel_ddp.agent.node import socket_owners
from otel_ddp.agent.scrape.server import CLIENT_TIMEOUT_S, BoundedServer
from otel_ddp.history.page import guard
from otel_ddp.history.page.app import App
from otel_ddp.history.page.exchange import Answer, Question, Refused, as_text


class Handler(BaseHTTPRequestHandler):
    server: BoundedServer
    server_version = "otel-ddp"
    sys_version = ""
    timeout = CLIENT_TIMEOUT_S
    known_name = ""
    any_name = False

    def answer(self) -> Answer:
        """The answer to a request that the guard has let through."""
        raise NotImplementedError

    def page_answer(self, app: App, *, is_known: bool = False) -> Answer:
        """The page's answer. *is_known*: who asks has shown that they may see everything."""
        known = [True] if is_known else []

        def is_private() -> bool:
            if not known:
                known.append(self._is_own_connection())
            return known[0]

        headers = {name.lower(): value for name, value in self.headers.items()}
        return app.answer(
            Question.of_address(
                self.path, method=self.command, headers=headers, is_private=is_private
            )
        )

    def _is_own_connection(self) -> bool:
        """Whether our own user or root has opened this connection on this node."""
        try:
            peer, own = self.connection.getpeername(), self.connection.getsockname()
        except OSError:
            return False
        return socket_owners.is_own(peer[:2], own[:2])

    def do_GET(self) -> None:
        self.server.has_asked(self.connection)
        try:
            guard.check(self.path, self.headers, known_name=self.known_name, any_name=self.any_name)
            given = self.answer()
        except Refused as why:
            given = as_text(why.status, f"{why}\n")
        self.server.is_answered(self.connection)
        self.send_response(given.status)
        for name, value in given.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(given.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(given.body)

    do_HEAD = do_POST = do_GET

    def end_headers(self) -> None:
        # The library's own answers to what is no request at all end here as well.
        for name, value in guard.HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
