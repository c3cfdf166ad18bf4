"""A Prometheus and a Grafana as far as a drill asks them, with real sockets."""

from __future__ import annotations

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

from otel_ddp.cli.shipped import board_files, rule_names

if TYPE_CHECKING:
    from typing_extensions import Self

RANKS = ({"rank": "0", "local_rank": "0"}, {"rank": "1", "local_rank": "1"})
LABELS = {"group": "drill", "job_type": "train", "node": "n"}


class Asked(NamedTuple):
    """One request."""

    path: str
    promql: str
    authorization: str


class DrillServers:
    """Both in one; a test breaks what it likes to break."""

    def __init__(self, certificate: Path | None = None, key: Path | None = None) -> None:
        self.asked: list[Asked] = []
        self.status = 200
        self.said: object = None
        self.redirect_to = ""
        self.rules: dict[str, str] = dict.fromkeys(rule_names(), "vector(1)")
        """The query of each rule."""
        self.errors: dict[str, str] = {}
        """What the last evaluation of a rule said."""
        self.firing: set[str] = {"TrainingStraggler", "TrainingStalled", "TrainingRunKilled"}
        self.pending: set[str] = set()
        self.state = "training_state"
        self.without = ""
        """A label that is lost on the way."""
        self.ranks = 2
        self.panels_bring = True
        self.knows_runs = True
        """Whether the panels that ask for a run bring something."""
        self.refused_query = ""
        self.boards = {each["uid"]: each for each in board_files().values()}
        self.sources: dict[str, Any] = {
            "Other": {"type": "loki", "uid": "l"},
            "Second": {"type": "prometheus", "uid": "p2", "name": "Second"},
            "First": {"type": "prometheus", "uid": "p1", "name": "First", "isDefault": True},
        }
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = False
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        scheme = "https" if certificate else "http"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, path: str, promql: str) -> tuple[int, object]:
        """Status and body."""
        if self.status != 200 or self.said is not None:
            return self.status, self.said
        if path.startswith("/api/datasources/proxy/uid/"):
            path = "/" + path.split("/", 6)[6]
        if path == "/api/v1/rules":
            rules = [
                {
                    "name": name,
                    "query": query,
                    "health": "err" if name in self.errors else "ok",
                    "lastError": self.errors.get(name, ""),
                }
                for name, query in self.rules.items()
            ]
            return 200, {"data": {"groups": [{"rules": rules}]}}
        if path == "/api/frontend/settings":
            return 200, {"datasources": self.sources}
        if path.startswith("/api/dashboards/uid/"):
            found = self.boards.get(path.rpartition("/")[2])
            return (200, {"dashboard": found}) if found else (404, {"message": "not found"})
        if self.refused_query and self.refused_query in promql:
            return 400, {"error": "invalid parameter"}
        return 200, {"data": {"result": [{"metric": each} for each in self._series(promql)]}}

    def _series(self, promql: str) -> list[dict[str, str]]:
        if promql.startswith("ALERTS{"):
            state = self.firing if 'alertstate="firing"' in promql else self.pending
            return [{"alertname": each} for each in state if f'alertname="{each}"' in promql]
        run = promql.partition('run="')[2].partition('"')[0]
        if promql.startswith(("training_state{group", '{run="drill')):
            name = promql.partition("{")[0]
            if name not in ("", self.state):
                return []
            found = [
                {"__name__": self.state, "run": run, **LABELS, **rank}
                for rank in RANKS[: self.ranks]
            ]
            return [{k: v for k, v in each.items() if k != self.without} for each in found]
        known = self.knows_runs or not ("drill-" in promql and "vector(" not in promql)
        return [{}] if self.panels_bring and known else []

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        servers = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._reply("")

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                self._reply(parse_qs(body).get("query", [""])[0])

            def _reply(self, promql: str) -> None:
                path = urlsplit(self.path).path
                sent = self.headers.get("Authorization", "")
                servers.asked.append(Asked(path, promql, sent))
                status, told = servers.answer(path, promql)
                body = told if isinstance(told, bytes) else json.dumps(told).encode()
                self.send_response(status)
                if servers.redirect_to:
                    self.send_header("Location", servers.redirect_to)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
