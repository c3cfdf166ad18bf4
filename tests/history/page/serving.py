"""The page, served as `otel-ddp open` does, by a thread of the test."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any, NamedTuple
from urllib.parse import urlencode

from otel_ddp.agent.serve.server import bind
from otel_ddp.history.page.app import App


class Served:
    """Used with `with`."""

    def __init__(self, app: App, port: int = 0) -> None:
        self._server = bind("127.0.0.1", port, lambda asked: asked.page_answer(app))
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(0.05))

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def url(self) -> str:
        return f"http://localhost:{self.port}"

    def __enter__(self) -> Served:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for each in list(self._server.answering):
            each.join()


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, path: str, method: str = "GET", /, **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers=named)
            answer = connection.getresponse()
            found = {name.lower(): value for name, value in answer.getheaders()}
            return Reply(answer.status, found, answer.read())
        finally:
            connection.close()

    def api(self, path: str, /, **query: Any) -> Reply:
        return self.ask(f"/api/{path}?{urlencode(query, doseq=True)}")
