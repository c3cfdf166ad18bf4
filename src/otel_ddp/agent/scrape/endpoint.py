"""Serves the node's /metrics, /healthz and a page for people over HTTP."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from otel_ddp import errors
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.scrape.families import LedgerCollector
from otel_ddp.agent.scrape.server import Handler, bind
from otel_ddp.agent.scrape.web_config import WebConfig
from otel_ddp.history.page.app import App
from otel_ddp.history.page.exchange import Answer, as_text

# Only where shutting the socket down does not wake the thread is this how long a stop may take.
_POLL_S = 1.0
# Longer than the agent's loop ever waits; a supervisor restarts an agent that is stuck.
_STUCK_S = 60.0


class Endpoint:
    """An HTTP server of the agent; where the port is taken, it uses the next free one."""

    def __init__(
        self,
        ledger: Ledger,
        host: str,
        port: int,
        page: App,
        idle_s: Callable[[], float] = lambda: 0.0,
        problems: Callable[[], Sequence[str]] = list,
        rules: WebConfig | None = None,
    ) -> None:
        """*idle_s*: for how long the agent's loop, which runs in another thread, has not moved.

        *problems*: what else does not run in the agent.
        *rules*: who may read it, and how; None: everyone, without encryption.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(LedgerCollector(ledger))
        handler = _handler(registry, page, idle_s, problems, rules, host)
        tls = None if rules is None else rules.tls
        self._server = bind(host, port, handler, tls)
        self._scheme = "http" if tls is None else "https"
        self.thread = KeptThread("endpoint", lambda: self._server.serve_forever(_POLL_S))

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        host = str(self._server.server_address[0])
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        shown = f"[{host}]" if ":" in host else host
        return f"{self._scheme}://{shown}:{self.port}/metrics"

    def start(self) -> None:
        self.thread.keep_running()

    def stop(self) -> None:
        # Wakes the thread, so that it need not poll often.
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        if self.thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        self.thread.join(2.0)
        # Answers that are being sent may end, unless a client reads very slowly.
        deadline = time.monotonic() + 1.0
        for thread in list(self._server.answering):
            thread.join(max(deadline - time.monotonic(), 0.0))


@errors.contained()
def _render(encoder: Callable[[CollectorRegistry], bytes], registry: CollectorRegistry) -> bytes:
    return encoder(registry)


def _handler(
    registry: CollectorRegistry,
    page: App,
    idle_s: Callable[[], float],
    problems: Callable[[], Sequence[str]],
    rules: WebConfig | None,
    host: str,
) -> type[Handler]:
    rendering = threading.Lock()

    class EndpointHandler(Handler):
        known_name = host
        any_name = rules is not None

        def answer(self) -> Answer:
            path = self.path.split("?", 1)[0]
            # A probe has no token, and learns only whether the agent is well.
            if path == "/healthz" and self.command != "POST":
                return self._health()
            if rules is not None and not rules.admits(self.headers.get("Authorization") or ""):
                asks = {"WWW-Authenticate": 'Basic realm="otel-ddp", charset="UTF-8"'}
                return as_text(401, "name yourself\n", asks)
            if path == "/metrics" and self.command != "POST":
                return self._metrics()
            return self.page_answer(page, is_known=rules is not None and bool(rules.token))

        def _metrics(self) -> Answer:
            encoder, kind = choose_encoder(self.headers.get("Accept") or "")
            with rendering:
                body = _render(encoder, registry)
            if body is None:
                return as_text(500, "it could not be rendered: the agent's log says why\n")
            return Answer(200, {"Content-Type": kind}, body)

        def _health(self) -> Answer:
            lines = list(problems())
            if (stuck_s := idle_s()) > _STUCK_S:
                lines.insert(0, f"the agent's loop has not moved for {stuck_s:.0f} s")
            return as_text(503 if lines else 200, "".join(f"{line}\n" for line in lines or ["ok"]))

    return EndpointHandler
