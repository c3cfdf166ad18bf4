"""What each server of ours does with a request: the guard looks at it, and one answer is sent."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from typing import Any

from otel_ddp.agent.scrape.server import CLIENT_TIMEOUT_S, BoundedServer
from otel_ddp.history.page import guard
from otel_ddp.history.page.exchange import Answer, Refused, as_text


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
