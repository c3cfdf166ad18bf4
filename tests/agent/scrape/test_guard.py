"""What the guard lets through: on every path, of the agent and of `otel-ddp open`."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.scrape.serving import serving
from history.page.serving import Served
from otel_ddp.history.page import http
from otel_ddp.history.page.app import App

PATHS = ("/", "/metrics", "/healthz", "/api/runs", "/run/r", "/nothing")


@pytest.fixture(params=["agent", "page"])
def port(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[int]:
    if request.param == "page":
        with Served(App(tmp_path)) as served:
            yield served.port
    else:
        with serving(host="localhost", histories=tmp_path) as endpoint:
            yield endpoint.port


def ask(port: int, target: str, *lines: str) -> tuple[int, str]:
    """The status, and the whole answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall("\r\n".join([f"GET {target} HTTP/1.1", *lines, "", ""]).encode())
        text = b"".join(iter(lambda: client.recv(65536), b"")).decode()
    return int(text.split()[1]), text


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST.", "localhost:9464", "run.localhost"),
        *("127.0.0.1", "10.1.2.3:9464", "[::1]", "[::1]:9", socket.gethostname()),
    ],
)
def test_names_and_addresses_of_this_machine_are_answered(port: int, host: str) -> None:
    assert ask(port, "/api/runs", f"Host: {host}")[0] == 200
    assert ask(port, "/", f"Host: {host}")[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("evil.com", 403), ("localhost.evil.com:9464", 403), ("127.0.0.1.evil.com", 403)),
        *(("127.0.0.1%2eevil.com", 400), ("[::1].evil.com", 400), ("[::1%25.evil.com]", 400)),
        *(("localhost:9464@evil.com", 400), ("localhost:", 400), ("localhost evil.com", 400)),
        *(("localhost,evil.com", 400), ("[evil.com]", 400), ("", 400)),
        *(("localhost\r\nHost: localhost", 400), ("localhost\r\nhost: evil.com", 400)),
        ("localhost\r\n .evil.com", 400),
    ],
)
def test_no_other_name_is_answered_on_any_path(port: int, host: str, status: int) -> None:
    for path in PATHS:
        found, text = ask(port, path, f"Host: {host}")

        assert (found, "training_" in text) == (status, False)


@pytest.mark.parametrize("target", ["http://localhost/metrics", "//localhost/metrics", "metrics"])
def test_only_paths_are_answered(port: int, target: str) -> None:
    status = ask(port, target, "Host: localhost")[0]

    # Python itself takes the second of two slashes away.
    assert status == (404 if target.startswith("//") else 400)


def test_every_answer_has_the_headers_of_the_guard(port: int) -> None:
    asked = (["Host: localhost"], ["Host: evil.com"], ["Host: localhost", "x" * 70000])
    policy = {("Content-Security-Policy", http.HEADERS["Content-Security-Policy"])}
    for path, lines in itertools.product(PATHS, asked):
        _, text = ask(port, path, *lines)

        # The page has a policy of its own, as strict.
        assert text.count("\r\nContent-Security-Policy: default-src 'none'; ") == 1
        for name, value in http.HEADERS.items() - policy:
            assert text.count(f"\r\n{name}: {value}\r\n") == 1


def test_any_name_is_answered_with_a_token_that_no_other_site_has(tmp_path: Path) -> None:
    with serving(histories=tmp_path, token=b"abc") as endpoint:
        token = "Authorization: Bearer abc"
        assert ask(endpoint.port, "/metrics", "Host: alias.example", token)[0] == 200
        assert ask(endpoint.port, "/api/runs", "Host: alias.example", token)[0] == 200
        assert ask(endpoint.port, "/metrics", "Host: alias.example")[0] == 401
        assert ask(endpoint.port, "/metrics", "Host: a@alias.example", token)[0] == 400
