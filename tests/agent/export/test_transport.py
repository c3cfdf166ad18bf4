"""Real requests over real sockets: what is sent, and the outcome of each answer."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.stack.server import free_port

from node import new_certificate
from otel_ddp import settings
from otel_ddp.agent.export.delivery import Outcome
from otel_ddp.agent.export.otlp.render import Renderer
from otel_ddp.agent.export.otlp.transport import Transport
from otel_ddp.agent.export.otlp.variables import SIGNALS, Variables, signals_with_endpoint
from otel_ddp.journal.layout import EVENT, SPAN
from otel_ddp.journal.parser import Document
from otlp_receiver import Receiver, gauges

HTTP, GRPC = "http/protobuf", "grpc"

DOCUMENTS = [
    Document(SPAN, {"name": "step", "id": "01" * 8, "start": 1, "end": 2}, 0),
    Document(EVENT, {"name": "run.started", "time": 1, "body": "hello"}, 0),
]
BODY: dict[str, bytes] = {
    "metrics": gauges(("training.loss", 3, 0.5), **{"service.name": "training"}),
    **{each.lane: each.body for each in Renderer({}).documents([((), "", DOCUMENTS)])},
}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of the machine's own, no logger left quiet."""
    for name in list(os.environ):
        if name.startswith("OTEL_") or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    logger = logging.getLogger("opentelemetry.util.re")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


class Way:
    """A receiver, and transports to it as the agent makes them: from the environment."""

    def __init__(self, receiver: Receiver, protocol: str, patch: pytest.MonkeyPatch) -> None:
        self.receiver, self.protocol, self._patch = receiver, protocol, patch
        self.made: list[Transport] = []

    def start(self, **how: Any) -> str:
        """The address of the receiver, from now on."""
        begin = self.receiver.start_grpc if self.protocol == GRPC else self.receiver.start_http
        return begin(**how)

    def set(self, **variables: str) -> None:
        """Set OTEL_EXPORTER_OTLP_<these>."""
        for name, text in variables.items():
            self._patch.setenv(f"OTEL_EXPORTER_OTLP_{name}", text)

    def connect(self, endpoint: str = "", **how: Any) -> Transport:
        """To this address, or to the receiver; *how*: settings."""
        conf = settings.read(
            **{"protocol": self.protocol, "endpoint": endpoint or self.start()} | how
        )
        self.made.append(Transport(conf))
        return self.made[-1]

    def send(self, endpoint: str = "", **how: Any) -> Outcome:
        """One request of metrics."""
        return self.connect(endpoint, **how).send("metrics", BODY["metrics"])


def _way(receiver: Receiver, protocol: str, patch: pytest.MonkeyPatch) -> Iterator[Way]:
    way = Way(receiver, protocol, patch)
    yield way
    for transport in way.made:
        transport.close()


@pytest.fixture(params=[HTTP, GRPC])
def way(
    request: pytest.FixtureRequest, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Way]:
    yield from _way(receiver, request.param, monkeypatch)


@pytest.fixture
def http(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    yield from _way(receiver, HTTP, monkeypatch)


def send_all(transport: Transport) -> list[str]:
    """One request of each signal; how each ended."""
    return [transport.send(signal, BODY[signal]).kind for signal in SIGNALS]


def test_each_signal_arrives_as_it_was_encoded(way: Way) -> None:
    assert send_all(way.connect()) == ["delivered"] * 3

    (point,) = way.receiver.points()
    assert (point.metric, point.kind, point.value) == ("training.loss", "gauge", 0.5)
    assert (point.attributes, point.resource) == ({"rank": 3}, {"service.name": "training"})
    assert (point.time_ns, point.start_ns) == (17, 0)
    assert [span.name for span in way.receiver.spans()] == ["step"]
    assert [record.event_name for record in way.receiver.logs()] == ["run.started"]


def test_a_signal_goes_where_a_variable_names_an_endpoint_and_else_nowhere() -> None:
    own = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318", "OTEL_LOGS_EXPORTER": "none"}

    assert signals_with_endpoint(settings.read(), {}) == ()
    assert signals_with_endpoint(settings.read(), own) == ("traces",)
    assert signals_with_endpoint(settings.read(endpoint="http://c:4318"), own) == (
        "metrics",
        "traces",
    )


@pytest.mark.parametrize(
    ("mode", "kind", "says"),
    [
        ("ok", "delivered", "accepted by"),
        ("partial", "delivered", "accepted the rest"),
        *((429, "retry", ""), (503, "retry", ""), (404, "retry", ""), (500, "retry", "")),
        (409, "retry", ""),
        *((401, "retry", "token rejected"), (403, "retry", "token rejected")),
        *((400, "refused", "told to say 400"), (413, "retry", "raise its limit to 1 MiB")),
    ],
)
def test_every_answer_has_its_outcome(way: Way, mode: str | int, kind: str, says: str) -> None:
    way.receiver.set_mode(mode)
    way.receiver.retry_after = "3.5"

    outcome = way.send()

    assert outcome.kind == kind
    assert says in outcome.why
    assert outcome.doubtful is (mode in (409, 413, 500))
    assert outcome.rejected == (3 if mode == "partial" else 0)
    asked_s = 3.5 if way.protocol == HTTP and mode in (429, 503) else 0.0
    assert outcome.retry_after_s == asked_s
    # One attempt each: the delivery decides when to try again.
    assert way.receiver.attempts == ["metrics"]


ABOUT_THE_WAY = (307, 401, 403, 404, 408, 429, 502, 503, 504)
IN_DOUBT = (409, 413, 431, 500, 599)


def test_only_what_is_wrong_with_the_bytes_is_refused(http: Way) -> None:
    transport = http.connect()
    found: dict[tuple[str, bool], list[int]] = {}
    for status in (*ABOUT_THE_WAY, *IN_DOUBT, 400, 422):
        http.receiver.set_mode(status)
        http.receiver.retry_after = "soon"
        outcome = transport.send("metrics", BODY["metrics"])
        found.setdefault((outcome.kind, outcome.doubtful), []).append(status)
        assert outcome.retry_after_s == 0.0

    assert found == {
        ("retry", False): [*ABOUT_THE_WAY],
        ("retry", True): [*IN_DOUBT],
        ("refused", False): [400, 422],
    }


def test_a_collector_that_comes_back_is_used_again(way: Way) -> None:
    port = free_port()
    transport = way.connect(f"http://user:secret@127.0.0.1:{port}")

    first = transport.send("metrics", BODY["metrics"])
    way.start(port=port)
    second = transport.send("metrics", BODY["metrics"])

    assert first.kind == "retry"
    assert f" http://127.0.0.1:{port}" in first.why
    assert "connection refused" in first.why.lower()
    # Credentials are never shown.
    assert "secret" not in first.why
    assert second.kind == "delivered"


# The specification's milliseconds. As seconds, this test would run into its limit.
def test_an_attempt_without_an_answer_ends_after_the_timeout(way: Way) -> None:
    way.set(TIMEOUT="100000000", METRICS_TIMEOUT="300")
    way.receiver.set_mode("hang")

    outcome = way.send()

    assert outcome.kind == "retry"
    assert outcome.why.startswith("no answer from http://127.0.0.1:")
    assert outcome.why.endswith("within 0.3 s")


def test_a_signals_own_endpoint_and_protocol_win(http: Way) -> None:
    http.set(LOGS_PROTOCOL="grpc", LOGS_ENDPOINT=http.receiver.start_grpc())
    http.set(TRACES_ENDPOINT=f"{http.start()}/v1/traces")

    outcomes = send_all(http.connect(f"http://127.0.0.1:{free_port()}"))

    assert outcomes == ["retry", "delivered", "delivered"]
    assert {r.signal: "grpc" in r.headers["user-agent"] for r in http.receiver.requests} == {
        "traces": False,
        "logs": True,
    }


def test_a_proxy_of_the_cluster_is_not_used_for_loopback(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy = f"http://127.0.0.1:{free_port()}"
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy)

    assert way.send().kind == "delivered"


# ------------------------------------------------------------------- another host, and its secrets


def elsewhere(endpoint: str) -> str:
    """The same server by an address that is not that of loopback."""
    return endpoint.replace("127.0.0.1", "0.0.0.0")


@contextlib.contextmanager
def served(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a server that talks to its clients as the test says."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=talk, args=(server,))
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def read_until(end: bytes, connection: socket.socket) -> bytes:
    seen = b""
    while not seen.endswith(end):
        piece = connection.recv(65536)
        assert piece, seen
        seen += piece
    return seen


def test_what_goes_to_another_host_goes_by_the_proxy_that_the_variables_name(
    http: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []

    def refuse(server: socket.socket) -> None:
        for end in (BODY["metrics"], b"\r\n\r\n"):
            connection, _ = server.accept()
            with connection:
                asked.append(read_until(end, connection))
                connection.sendall(b"HTTP/1.1 407 No\r\nContent-Length: 0\r\n\r\n")

    http.set(COMPRESSION="none")
    with served(refuse) as proxy:
        for name in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(name, f"me:p%40ss@{proxy}")
        found = [http.send(f"{scheme}://far.example:81").why for scheme in ("http", "https")]
    monkeypatch.setenv("no_proxy", "localhost, 0.0.0.0/8")

    assert http.send(elsewhere(http.start())).kind == "delivered"
    posted, connected = asked
    assert posted.startswith(b"POST http://far.example:81/v1/metrics ")
    assert connected.startswith(b"CONNECT far.example:81 ")
    assert all(b"Proxy-Authorization: Basic bWU6cEBzcw==" in each for each in asked)
    assert all("407" in why for why in found)


@pytest.mark.parametrize(
    ("header", "expected"),
    [("", "Basic dXNlcjpwQHNz"), ("authorization=Bearer%20abc", "Bearer abc")],
)
def test_a_user_in_the_address_is_sent_unless_a_token_is_configured(
    way: Way, header: str, expected: str
) -> None:
    way.set(HEADERS=header)

    way.send(way.start().replace("//", "//user:p%40ss@"))

    (request,) = way.receiver.requests
    assert request.headers["authorization"] == expected


@pytest.mark.parametrize(
    ("header", "user", "is_warned"),
    [
        ("x-api-key=canary,x-team=ml", "", True),
        ("", "user:canary@", True),
        ("x-scope-orgid=ml", "", False),
    ],
)
def test_a_secret_that_goes_to_another_host_unencrypted_is_warned_of_once(
    way: Way, caplog: pytest.LogCaptureFixture, header: str, user: str, is_warned: bool
) -> None:
    way.set(HEADERS=header)
    here = way.start()

    for endpoint in (here, elsewhere(here)):
        send_all(way.connect(endpoint.replace("//", f"//{user}")))

    line = f"A token or password goes to {elsewhere(here)} without encryption: use https://."
    assert caplog.messages == [line] * is_warned


@pytest.mark.parametrize(("insecure", "warned"), [("true", True), ("false", False)])
def test_an_address_without_a_scheme_is_unencrypted_if_it_says_so(
    insecure: str, warned: bool
) -> None:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": "far.example:4317",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=canary",
        "OTEL_EXPORTER_OTLP_INSECURE": insecure,
    }

    doubt = Variables("metrics", settings.read(env), env).doubt()
    assert ("goes to far.example:4317 without encryption" in doubt) == warned


@pytest.mark.parametrize(
    ("asked", "far", "encoding"),
    [("", True, "gzip"), ("none", True, None), ("gzip", False, "gzip"), ("", False, None)],
)
def test_what_goes_to_another_host_is_compressed_unless_asked_otherwise(
    http: Way, asked: str, far: bool, encoding: str | None
) -> None:
    http.set(COMPRESSION=asked)
    endpoint = http.start()

    http.send(elsewhere(endpoint) if far else endpoint)

    (request,) = http.receiver.requests
    assert request.headers.get("content-encoding") == encoding


# --------------------------------------------------------------------------- TLS


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Two self-signed certificates for this machine."""
    directory = tmp_path_factory.mktemp("tls")
    names = ("server", "stranger")
    for name in names:
        new_certificate(directory, name)
    return {name: (directory / f"{name}.crt", directory / f"{name}.key") for name in names}


Certificates = dict[str, tuple[Path, Path]]


def test_a_certificate_from_the_environment_is_read_again_at_each_attempt(
    way: Way, certificates: Certificates, tmp_path: Path
) -> None:
    late = tmp_path / "ca.pem"
    way.set(CERTIFICATE=str(late))
    transport = way.connect(way.start(tls=certificates["server"]))

    outcomes = [transport.send("metrics", BODY["metrics"])]
    for name in ("stranger", "server"):
        late.write_bytes(certificates[name][0].read_bytes())
        outcomes.append(transport.send("metrics", BODY["metrics"]))

    missing, of_another, trusted = outcomes
    assert [each.kind for each in outcomes] == ["retry", "retry", "delivered"]
    assert f"OTEL_EXPORTER_OTLP_CERTIFICATE: {late}: No such file or directory" in missing.why
    assert "certificate verify failed" in of_another.why.lower().replace("_", " ")
    assert trusted.kind == "delivered"
    assert way.receiver.attempts == ["metrics"]


def test_tls_towards_a_collector_without_it_never_falls_back(way: Way) -> None:
    outcome = way.send(way.start().replace("http:", "https:"))

    assert outcome.kind == "retry"
    assert "SSL" in outcome.why or "TLS" in outcome.why
    assert way.receiver.attempts == []


# --------------------------------------------------------------------------- bad settings


NO_ADDRESS = "is no address to send to; http://host:4318 would be one"
FAR = "http://far.example:81"


@pytest.mark.parametrize(
    ("endpoint", "proxy", "why"),
    [
        ("collector:4318", "", f"collector:4318/v1/metrics {NO_ADDRESS}"),
        ("http://no..name:4318", "", f"http://no..name:4318 {NO_ADDRESS}"),
        (FAR, "socks5://127.0.0.1:9", f"no way to {FAR}: a proxy has to be of http://"),
    ],
)
def test_what_can_be_no_address_or_no_proxy_is_explained(
    http: Way, monkeypatch: pytest.MonkeyPatch, endpoint: str, proxy: str, why: str
) -> None:
    monkeypatch.setenv("http_proxy", proxy)

    assert http.send(endpoint).why == why


# --------------------------------------------------------------------------- odd replies


HUGE = 4 * 1024 * 1024


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n\xff\xff\xff\xff\xff", "delivered"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % HUGE + b"x" * HUGE, "delivered"),
        (b"HTTP/1.1 400 No\r\nContent-Length: %d\r\n\r\n" % HUGE + b"x" * HUGE, "refused"),
        # TLS ports answer http:// like this: the request was not read.
        (b"HTTP/1.0 400 Bad Request\r\n\r\n", "retry"),
        (
            b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\n\r\n"
            b"The plain HTTP request was sent to HTTPS port",
            "retry",
        ),
        (b"SSH-2.0-OpenSSH\r\n", "retry"),
    ],
)
def test_odd_replies_are_survived(http: Way, reply: bytes, kind: str) -> None:
    def talk(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            read_until(BODY["metrics"], connection)
            connection.sendall(reply)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65536):
                pass

    with served(talk) as address:
        transport = http.connect(f"http://{address}")
        outcome = transport.send("metrics", BODY["metrics"])
        transport.close()

    assert outcome.kind == kind


def test_a_collector_that_stops_reading_ends_the_attempt_at_the_timeout(http: Way) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        transport = http.connect(f"http://127.0.0.1:{deaf.getsockname()[1]}", timeout_s=0.1)

        # More than the kernel buffers for a server that does not accept.
        outcome = transport.send("metrics", bytes(32 * 1024 * 1024))

    assert outcome.kind == "retry"
    assert outcome.why.endswith("within 0.1 s")


def test_an_answer_to_a_request_of_which_the_rest_is_not_read_counts(http: Way) -> None:
    def refuse(server: socket.socket) -> None:
        connection, _ = server.accept()
        connection.recv(1)
        connection.sendall(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n")
        # With more to read, the kernel resets the connection.
        connection.close()

    with served(refuse) as address:
        # More than the kernel buffers for a server that does not read.
        outcome = http.connect(f"http://{address}").send("metrics", bytes(32 * 1024 * 1024))

    assert outcome.why.startswith("401 "), outcome.why


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("METRICS_ENDPOINT", "http://[::1"),
        ("METRICS_ENDPOINT", "http://"),
        ("HEADERS", "authorization=sec%0Aret"),
    ],
)
def test_a_variable_that_cannot_work_is_an_outcome_and_no_exception(
    way: Way, variable: str, text: str
) -> None:
    way.set(**{variable: text})

    outcome = way.send(timeout_s=2.0)

    assert outcome.kind == "retry", outcome.why
    assert "ret" not in outcome.why.replace("retry", "")
    assert outcome.why
