"""Who may read the endpoint: TLS, a token, and files that cannot be used."""

from __future__ import annotations

import base64
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.scrape.serving import serving
from node import new_certificate
from otel_ddp.agent.scrape import server as servers
from otel_ddp.agent.scrape import web_config
from otel_ddp.agent.scrape.endpoint import Endpoint
from otel_ddp.agent.scrape.web_config import Refused

TLS = "tls_server_config: {cert_file: tls.crt, key_file: tls.key}\n"
TOKEN = "bearer_token_file: token\n"

# What a client sees that speaks another language.
NO_ANSWER = (ssl.SSLError, urllib.error.URLError, ConnectionError)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    new_certificate(folder, "tls")
    (folder / "token").write_text("abc\n")
    return folder


@contextmanager
def served(path: Path, content: str) -> Iterator[Endpoint]:
    path.write_text(content)
    with serving(rules=web_config.read(path)) as endpoint:
        yield endpoint


def status(url: str, authorization: str = "", context: ssl.SSLContext | None = None) -> int:
    headers = {"Authorization": authorization} if authorization else {}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


def basic(name: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()


def test_the_token_is_let_in_and_nothing_else(keys: Path) -> None:
    with served(keys / "token.yml", TOKEN) as endpoint:
        expected = {
            "": 401,
            "Bearer abc": 200,
            "bearer abc": 200,
            "Bearer abd": 401,
            "Bearer \u00fc": 401,
            "Bearer": 401,
            "Digest abc": 401,
            # As a browser shows it, under any name.
            basic("anyone", "abc"): 200,
            basic("abc", ""): 401,
            basic("anyone", "abd"): 401,
            "Basic abc": 401,
            "Basic \u00fc": 401,
        }
        for path in ("", "metrics"):
            url = endpoint.url.replace("metrics", path)
            found = {each: status(url, each) for each in expected if each.isascii()}
            assert found == {k: v for k, v in expected.items() if k.isascii()}
        # A probe has no token.
        assert status(endpoint.url.replace("metrics", "healthz")) == 200
    rules = web_config.read(keys / "token.yml")
    assert {each: rules.admits(each) for each in expected} == {
        each: code == 200 for each, code in expected.items()
    }


def test_tls_is_spoken_and_nothing_else(keys: Path) -> None:
    with served(keys / "tls.yml", TLS) as endpoint:
        assert endpoint.url.startswith("https://127.0.0.1:")
        trusting = ssl.create_default_context(cafile=str(keys / "tls.crt"))

        assert status(endpoint.url, context=trusting) == 200
        with pytest.raises(NO_ANSWER):
            status(endpoint.url.replace("https", "http"))


def test_a_client_that_never_shakes_hands_delays_no_other(keys: Path) -> None:
    context = ssl.create_default_context(cafile=str(keys / "tls.crt"))
    with (
        served(keys / "slow.yml", TLS) as endpoint,
        socket.create_connection(("127.0.0.1", endpoint.port)),
    ):
        assert status(endpoint.url, context=context) == 200


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "protects nothing"),
        ("[a]", "must have settings with a name: bearer_token_file, tls_server_config"),
        ("bearer_tokenfile: token", "bearer_tokenfile is not supported: bearer_token_file"),
        ("basic_auth_users: {me: hash}", "use a token, or put a proxy in front"),
        ("bearer_token_file: nope", "nope cannot be read: No such file"),
        ("bearer_token_file: 3", "bearer_token_file must name a file"),
        ("bearer_token_file: empty", "is empty"),
        ("tls_server_config: on", "must have settings with a name: cert_file, key_file"),
        ("tls_server_config:", "cert_file must name a file"),
        ("tls_server_config: {cert_file: tls.crt}", "key_file must name a file"),
        ("tls_server_config: {cert_file: tls.crt, key_file: token}", "cannot be read"),
        (TLS.replace("}", ", client_ca_file: tls.crt}"), "client_ca_file is not supported"),
        ("a: [", "cannot be used: while parsing"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(keys: Path, content: str, why: str) -> None:
    (keys / "empty").write_text("")
    path = keys / "bad.yml"
    path.write_text(content)

    with pytest.raises(Refused) as refused:
        web_config.read(path)

    assert why in str(refused.value)


def test_loopback_is_open_and_other_addresses_need_rules(keys: Path) -> None:
    path = keys / "some.yml"
    path.write_text(TOKEN)

    assert web_config.find("", "127.0.0.1") is None
    assert web_config.find("", "localhost") is None
    assert web_config.find("insecure", "0.0.0.0") is None
    for host in ("127.0.0.1", "0.0.0.0"):
        assert web_config.find(str(path), host) is not None
    for host in ("0.0.0.0", "::", "10.1.2.3", "node7"):
        with pytest.raises(Refused) as refused:
            web_config.find("", host)
        assert f"{host} is reached from other machines: set OTEL_DDP_WEB_CONFIG" in str(
            refused.value
        )


def test_a_client_for_whom_there_is_no_thread_takes_no_place_for_ever(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Short(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(servers, "_MOST_CLIENTS", 2)
    with served(keys / "short.yml", TLS) as endpoint:
        with monkeypatch.context() as without:
            without.setattr("socketserver.threading.Thread", Short)
            without.setattr(servers, "CLIENT_TIMEOUT_S", 0.1)
            for _ in range(4):
                with socket.create_connection(("127.0.0.1", endpoint.port), 10) as client:
                    assert client.recv(1) == b""

        context = ssl.create_default_context(cafile=str(keys / "tls.crt"))
        assert status(endpoint.url, context=context) == 200
