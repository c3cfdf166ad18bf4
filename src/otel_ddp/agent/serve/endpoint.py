"""Serves /metrics from the ledger, /healthz, and the page."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family

from otel_ddp import errors
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.ledger import Buckets, Labels, Ledger, Series
from otel_ddp.agent.serve.server import Handler, admits, bind
from otel_ddp.history.page.app import App
from otel_ddp.history.page.http import Answer, as_text
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Kind

# How often the thread checks whether to stop. `stop` takes this long if shutting the socket down
# does not wake the thread.
_POLL_S = 1.0
# If the agent's loop makes no progress for this long, /healthz fails, so that a supervisor restarts
# the agent. The time must be longer than any wait in the loop.
_STUCK_S = 60.0

_TYPES = {
    Kind.COUNTER: "counter",
    Kind.GAUGE: "gauge",
    Kind.UPDOWN: "gauge",
    Kind.HISTOGRAM: "histogram",
}


class LedgerRegistry(CollectorRegistry):
    """The ledger as Prometheus metric families. The names are those that an OTel collector's
    Prometheus exporter would use."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger

    def collect(self) -> Iterator[Family]:
        with self._ledger.lock:
            return iter([_family(*each) for each in self._ledger.families()])


def _family(metric: catalog.Metric, rows: list[Series]) -> Family:
    name = metric.prometheus
    base = name.removesuffix("_total") if metric.kind is Kind.COUNTER else name
    family = Family(base, metric.description, _TYPES[metric.kind])
    for series in rows:
        labels = _prometheus_labels(series.labels)
        if isinstance(series.value, Buckets):
            _add_histogram(family, labels, metric.bounds, series.value)
        elif series.value is not None:
            family.add_sample(name, labels, series.value)
    return family


# The cache shortens the time in which a scrape locks the ledger: with 8 ranks and 900 names, from
# 130 ms to between 20 and 60 ms.
@lru_cache(maxsize=1 << 15)
def _prometheus_labels(labels: Labels) -> dict[str, str]:
    return {
        # Replace lone surrogates, which a device's name may contain: they can't be encoded, so the
        # whole answer would fail.
        catalog.prometheus_label(key): value.encode("utf-8", "replace").decode()
        for key, value in labels
    }


def _add_histogram(
    family: Family, labels: dict[str, str], bounds: tuple[float, ...], value: Buckets
) -> None:
    total = 0.0
    for bucket, count in enumerate(value.counts):
        total += count
        edge = repr(float(bounds[bucket])) if bucket < len(bounds) else "+Inf"
        family.add_sample(f"{family.name}_bucket", {**labels, "le": edge}, total)
    family.add_sample(f"{family.name}_count", labels, total)
    family.add_sample(f"{family.name}_sum", labels, value.total)


class Endpoint:
    """The agent's HTTP server, on *port* or the next free port."""

    def __init__(
        self,
        ledger: Ledger,
        host: str,
        port: int,
        page: App,
        idle_s: Callable[[], float] = lambda: 0.0,
        problems: Callable[[], Sequence[str]] = list,
        token: bytes = b"",
    ) -> None:
        """*idle_s*: returns the seconds since the agent's loop began its last round. *problems*:
        returns other problems that /healthz reports. *token*: requests must have this token; empty
        if they need none."""
        self._registry = LedgerRegistry(ledger)
        self._rendering = threading.Lock()
        self._page, self._idle_s, self._problems, self._token = page, idle_s, problems, token
        self._server = bind(host, port, self._answer, any_name=bool(token))
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
        return f"http://{shown}:{self.port}/metrics"

    def start(self) -> None:
        self.thread.keep_running()

    def stop(self) -> None:
        # Shutting the socket down wakes the thread at once, so the thread need not poll often.
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        if self.thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        self.thread.join(2.0)
        # Wait for answers that are being sent, but not for a client that reads very slowly.
        deadline = time.monotonic() + 1.0
        for thread in list(self._server.answering):
            thread.join(max(deadline - time.monotonic(), 0.0))

    # -- answers, in one thread per client

    def _answer(self, asked: Handler) -> Answer:
        path = asked.path.split("?", 1)[0]
        # Answer /healthz without checking the token: liveness probes have none, and the answer says
        # nothing about the training.
        if path == "/healthz" and asked.command != "POST":
            return self._health()
        if not admits(self._token, asked.headers.get("Authorization") or ""):
            asks = {"WWW-Authenticate": 'Basic realm="otel-ddp", charset="UTF-8"'}
            return as_text(401, "this needs the token of OTEL_DDP_SCRAPE_TOKEN_FILE\n", asks)
        if path == "/metrics" and asked.command != "POST":
            return self._metrics(asked.headers.get("Accept") or "")
        return asked.page_answer(self._page, is_known=bool(self._token))

    def _metrics(self, accepted: str) -> Answer:
        encoder, kind = choose_encoder(accepted)
        with self._rendering:
            body = _render(encoder, self._registry)
        if body is None:
            return as_text(500, "it could not be rendered: the agent's log says why\n")
        return Answer(200, {"Content-Type": kind}, body)

    def _health(self) -> Answer:
        lines = list(self._problems())
        if (stuck_s := self._idle_s()) > _STUCK_S:
            lines.insert(0, f"the agent's loop has not moved for {stuck_s:.0f} s")
        return as_text(503 if lines else 200, "".join(f"{line}\n" for line in lines or ["ok"]))


@errors.contained()
def _render(encoder: Callable[[CollectorRegistry], bytes], registry: CollectorRegistry) -> bytes:
    return encoder(registry)
