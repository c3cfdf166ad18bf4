"""What `otel-ddp demo --check` says of a Prometheus in which the alert does not fire."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from otel_ddp.cli import main
from otel_ddp.cli.demo.check import fires, why_not
from otel_ddp.cli.fetch import NoAnswer
from otel_ddp.cli.programs.prometheus import Prometheus

RUN = "demo-hang-1"
STATE, PENDING = f'training_state{{run="{RUN}"}}', f'ALERTS{{alertname="A",run="{RUN}"}}'
FIRING = f'ALERTS{{alertname="A",alertstate="firing",run="{RUN}"}}'


class Answers(BaseHTTPRequestHandler):
    """What the server of a test has been told to answer."""

    def do_GET(self) -> None:
        server: Any = self.server
        server.tokens.append(self.headers.get("Authorization"))
        (query,) = parse_qs(urlsplit(self.path).query)["query"]
        result = [{"metric": {}}] if query in server.series else []
        body = server.body or json.dumps({"data": {"result": result}}).encode()
        self.send_response(server.status)
        self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    found: Any = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    found.series, found.tokens, found.body, found.status = [], [], b"", 200
    found.url = f"http://127.0.0.1:{found.server_address[1]}"
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.mark.parametrize(
    ("series", "said"),
    [
        ([], "has no series of demo-hang-1: look into the log of the collector"),
        ([STATE, PENDING], "A is pending: wait longer (--seconds)"),
        ([STATE], "A has found nothing: load deploy/prometheus/alerts and rules of this version"),
    ],
)
def test_what_is_missing_on_the_way_to_an_alert_is_said(
    server: Any, series: list[str], said: str
) -> None:
    server.series = series
    asked = Prometheus(server.url, "")

    assert not fires(asked, "A", RUN)
    assert said in why_not(asked, "A", RUN)


def test_an_alert_that_fires_is_seen_and_the_token_is_sent(server: Any) -> None:
    server.series = [FIRING]

    assert fires(Prometheus(server.url, "secret"), "A", RUN)
    assert fires(Prometheus(server.url.replace("://", "://me:word@"), ""), "A", RUN)

    assert server.tokens == ["Bearer secret", "Basic bWU6d29yZA=="]


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [(302, b"", "302"), (401, b"", "401"), (200, b"<html>", "is no Prometheus")],
)
def test_an_answer_that_is_none_is_said_without_the_password(
    server: Any, status: int, body: bytes, said: str
) -> None:
    server.status, server.body = status, body

    with pytest.raises(NoAnswer, match=said) as error:
        fires(Prometheus(server.url.replace("://", "://me:word@"), ""), "A", RUN)

    assert "word" not in str(error.value)
    # A redirect is not followed: the password is for this server alone.
    assert len(server.tokens) == 1


def test_what_is_no_address_is_refused_before_anything_is_played(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["demo", "--check", "localhost:9090"]) == 2

    assert "begins with http:// or https://" in capsys.readouterr().err
