"""A real receiver of notifications inside the test process."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Posted(NamedTuple):
    """One request that was answered with 200."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


class Webhook:
    """Answers each POST with `code`; None: it answers nothing, and closes the connection."""

    def __init__(self) -> None:
        self.code: int | None = 200
        self.attempts = 0
        self.posted: list[Posted] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [each.body for each in self.posted if each.body.get("kind") == kind]

    def __enter__(self) -> Webhook:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(webhook) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                webhook.attempts += 1
                if webhook.code is None:
                    return
                if webhook.code == 200:
                    webhook.posted.append(Posted(self.path, self.headers, json.loads(body)))
                self.send_response(webhook.code)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        return Handler
