"""The page, served as `otel-ddp open` does, by a thread of the test."""

from __future__ import annotations

import threading

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
