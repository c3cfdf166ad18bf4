"""A server inside the test process that answers questions as a Prometheus does."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit


def sample(value: Any, **labels: str) -> dict[str, Any]:
    """One series of an answer."""
    return {"metric": labels, "value": [1_800_000_000.0, value]}


class FakePrometheus:
    """Says to each expression what `answer` does; or `body` with `status`, where there is one."""

    def __init__(self) -> None:
        self.answer: Callable[[str], Any] = lambda _: []
        self.status, self.body = int(HTTPStatus.OK), b""
        self.tokens: list[str | None] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakePrometheus:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _handler(prometheus) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                prometheus.tokens.append(self.headers.get("Authorization"))
                (query,) = parse_qs(urlsplit(self.path).query)["query"]
                told = {"status": "success", "data": {"result": prometheus.answer(query)}}
                body = prometheus.body or json.dumps(told).encode()
                self.send_response(prometheus.status)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler
