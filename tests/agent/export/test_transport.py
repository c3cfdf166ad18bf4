"""Real requests over real sockets: what is sent, and the outcome of each answer."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from ipaddress import ip_address
from pathlib import Path

import pytest

from otel_ddp import settings
from otel_ddp.agent.export.otlp.documents import Documents
from otel_ddp.agent.export.otlp.encode import (
    attribute_bytes,
    metric,
    metrics_request,
    number_point,
    resource_bytes,
)
from otel_ddp.agent.export.otlp.outcome import SIGNALS, Outcome, Signal
from otel_ddp.agent.export.otlp.transport import Transport, find_on_loopback, is_trusted, why_none
from otel_ddp.journal.layout import EVENT, SPAN
from otel_ddp.journal.reader import Document
from otlp_receiver import Receiver

HTTP, GRPC = "http/protobuf", "grpc"
PROTOCOLS = pytest.mark.parametrize("protocol", [HTTP, GRPC])

DOCUMENTS = [
    Document(SPAN, {"name": "step", "id": "01" * 8, "start": 1, "end": 2}, 0),
    Document(EVENT, {"name": "run.started", "time": 1, "body": "hello"}, 0),
]
BODY: dict[Signal, bytes] = {
    "metrics": metrics_request(
        resource_bytes({"service.name": "training"}),
        "otel_ddp",
        "1",
        [
            metric(
                "training.loss",
                "The loss.",
                "",
                "gauge",
                [number_point(attribute_bytes({"rank": 3}), 17, 0.5)],
            )
        ],
    ),
    **{each.signal: each.body for each in Documents({}).render([((), "", DOCUMENTS)])},
}

Connect = Callable[..., Transport]


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable of the machine's own, no logger left quiet, no thread left behind."""
    for name in list(os.environ):
        if name.startswith(("OTEL_", "OTEL_DDP")) or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    names = ("opentelemetry.util.re", "urllib3")
    levels = {name: logging.getLogger(name).level for name in names}
    yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as receiver:
        yield receiver


@pytest.fixture
def connect() -> Iterator[Connect]:
    """A transport as the agent makes it: from the environment, with the endpoint it found."""
    made: list[Transport] = []

    def build(endpoint: str, protocol: str = HTTP, timeout_s: float = 20.0) -> Transport:
        found = settings.read(endpoint=endpoint, protocol=protocol, timeout_s=timeout_s)
        made.append(Transport(found))
        return made[-1]

    yield build
    for transport in made:
        transport.close()


def start(receiver: Receiver, protocol: str, **arguments: object) -> str:
    begin = receiver.start_grpc if protocol == GRPC else receiver.start_http
    return begin(**arguments)  # type: ignore[arg-type]


def closed_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@PROTOCOLS
def test_each_signal_arrives_as_it_was_encoded(
    receiver: Receiver, connect: Connect, protocol: str
) -> None:
    transport = connect(start(receiver, protocol), protocol)

    outcomes = [transport.send(signal, BODY[signal]).kind for signal in SIGNALS]

    assert outcomes == ["delivered"] * 3
    (point,) = receiver.points()
    assert (point.metric, point.kind, point.value) == ("training.loss", "gauge", 0.5)
    assert (point.attributes, point.resource) == ({"rank": 3}, {"service.name": "training"})
    assert (point.time_ns, point.start_ns) == (17, 0)
    assert [span.name for span in receiver.spans()] == ["step"]
    assert [record.event_name for record in receiver.logs()] == ["run.started"]


@PROTOCOLS
@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("slow", "delivered"),
        ("partial", "delivered"),
        (429, "retry"),
        (503, "retry"),
        (401, "retry"),
        (403, "retry"),
        (400, "refused"),
        (404, "retry"),
        (413, "refused"),
        (500, "retry"),
    ],
)
@pytest.mark.parametrize("signal", SIGNALS)
def test_every_answer_has_its_outcome(
    receiver: Receiver,
    connect: Connect,
    protocol: str,
    mode: str | int,
    kind: str,
    signal: Signal,
) -> None:
    receiver.set_mode(mode)
    receiver.slow_s = 0.05
    transport = connect(start(receiver, protocol), protocol)

    outcome = transport.send(signal, BODY[signal])

    assert kind == outcome.kind
    assert outcome.rejected == (3 if mode == "partial" else 0)
    # One attempt each: the delivery decides when to try again.
    assert receiver.attempts == [signal]


def test_a_redirect_is_no_success(receiver: Receiver, connect: Connect) -> None:
    receiver.set_mode("redirect")
    transport = connect(receiver.start_http())

    outcome = transport.send("metrics", BODY["metrics"])

    assert outcome.kind == "retry"
    assert outcome.why.startswith("302 from http://127.0.0.1:")
    assert receiver.attempts == ["metrics"]


@pytest.mark.parametrize(
    ("status", "kind", "doubtful"),
    [
        *((each, "retry", False) for each in (301, 302, 307, 308, 401, 403, 404, 405, 407, 408)),
        *((each, "retry", False) for each in (410, 415, 429, 502, 503, 504, 511)),
        *((each, "retry", True) for each in (409, 418, 431, 500, 501, 505, 520, 599)),
        *((each, "refused", False) for each in (400, 413, 422)),
    ],
)
def test_only_what_is_wrong_with_the_bytes_is_refused(
    receiver: Receiver, connect: Connect, status: int, kind: str, doubtful: bool
) -> None:
    receiver.set_mode(status)
    transport = connect(receiver.start_http())

    outcome = transport.send("metrics", BODY["metrics"])

    assert (outcome.kind, outcome.doubtful) == (kind, doubtful)
    assert outcome.too_large is (status == 413)


@PROTOCOLS
def test_the_collectors_reason_for_a_bad_request_is_reported(
    receiver: Receiver, connect: Connect, protocol: str
) -> None:
    receiver.set_mode(400)
    transport = connect(start(receiver, protocol), protocol)

    assert transport.send("metrics", BODY["metrics"]).why.endswith("told to say 400")


@PROTOCOLS
def test_a_rejected_token_is_named_as_the_reason(
    receiver: Receiver, connect: Connect, protocol: str
) -> None:
    receiver.set_mode(401)
    transport = connect(start(receiver, protocol), protocol)

    assert "token rejected" in transport.send("metrics", BODY["metrics"]).why


@PROTOCOLS
@pytest.mark.parametrize("mode", [429, 503])
def test_the_pause_that_the_collector_asks_for_is_reported(
    receiver: Receiver, connect: Connect, protocol: str, mode: int
) -> None:
    receiver.set_mode(mode)
    receiver.retry_after = "3.5"
    transport = connect(start(receiver, protocol), protocol)

    assert transport.send("metrics", BODY["metrics"]).retry_after_s == 3.5


def test_a_pause_given_as_a_date_is_understood(receiver: Receiver, connect: Connect) -> None:
    receiver.set_mode(503)
    receiver.retry_after = formatdate(time.time() + 3600, usegmt=True)
    transport = connect(receiver.start_http())

    wish = transport.send("metrics", BODY["metrics"]).retry_after_s

    assert wish is not None
    assert 1800 < wish <= 3600


@pytest.mark.parametrize("text", ["soon", "inf", "nan", ""])
def test_a_pause_that_cannot_be_read_is_none(
    receiver: Receiver, connect: Connect, text: str
) -> None:
    receiver.set_mode(503)
    receiver.retry_after = text
    transport = connect(receiver.start_http())

    outcome = transport.send("metrics", BODY["metrics"])

    assert (outcome.kind, outcome.retry_after_s) == ("retry", None)


@PROTOCOLS
def test_a_refused_connection_is_kept_for_later(connect: Connect, protocol: str) -> None:
    port = closed_port()
    transport = connect(f"http://127.0.0.1:{port}", protocol)

    outcome = transport.send("metrics", BODY["metrics"])

    assert outcome == Outcome("retry", f"connection refused by http://127.0.0.1:{port}")


@PROTOCOLS
def test_a_collector_that_comes_back_is_used_again(
    receiver: Receiver, connect: Connect, protocol: str
) -> None:
    port = closed_port()
    transport = connect(f"http://127.0.0.1:{port}", protocol)

    first = transport.send("metrics", BODY["metrics"])
    start(receiver, protocol, port=port)
    second = transport.send("metrics", BODY["metrics"])

    assert (first.kind, second.kind) == ("retry", "delivered")


def test_a_connection_that_the_collector_closed_meanwhile_is_no_failure(
    connect: Connect,
) -> None:
    with Receiver() as first:
        endpoint = first.start_http()
        transport = connect(endpoint)
        assert transport.send("metrics", BODY["metrics"]).kind == "delivered"
    with Receiver() as second:
        second.start_http(int(endpoint.rpartition(":")[2]))

        assert transport.send("metrics", BODY["metrics"]).kind == "delivered"


@PROTOCOLS
def test_an_attempt_without_an_answer_ends_after_the_timeout(
    receiver: Receiver, connect: Connect, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    # The specification's milliseconds. As seconds, this test would run into its limit.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "300")
    receiver.set_mode("hang")
    transport = Transport(settings.read(endpoint=start(receiver, protocol), protocol=protocol))

    outcome = transport.send("metrics", BODY["metrics"])
    transport.close()

    assert outcome.kind == "retry"
    assert outcome.why.startswith("no answer from http://127.0.0.1:")
    assert outcome.why.endswith("within 0.3 s")


@PROTOCOLS
def test_a_signals_own_timeout_is_in_milliseconds_too(
    receiver: Receiver, connect: Connect, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "200")
    receiver.set_mode("hang")
    transport = connect(start(receiver, protocol), protocol, timeout_s=1e8)

    assert transport.send("traces", BODY["traces"]).why.endswith("within 0.2 s")


@PROTOCOLS
def test_headers_from_the_environment_are_sent(
    receiver: Receiver, connect: Connect, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abc,x-team=ml")
    transport = connect(start(receiver, protocol), protocol)

    transport.send("metrics", BODY["metrics"])

    (request,) = receiver.requests
    assert request.headers["authorization"] == "Bearer abc"
    assert request.headers["x-team"] == "ml"


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_is_compressed_as_the_environment_asks(
    receiver: Receiver, connect: Connect, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", encoding)
    points = [number_point(attribute_bytes({"rank": 3}), i, 0.5) for i in range(500)]
    body = metrics_request(
        resource_bytes({}), "s", "1", [metric("training.loss", "", "", "gauge", points)]
    )
    transport = connect(receiver.start_http())

    transport.send("metrics", body)

    (request,) = receiver.requests
    assert request.headers["content-encoding"] == encoding
    assert request.wire_bytes < len(body) / 5
    assert len(receiver.points()) == 500


def test_gzip_over_grpc_arrives(
    receiver: Receiver, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", "gzip")
    transport = connect(receiver.start_grpc(), GRPC)

    assert transport.send("metrics", BODY["metrics"]).kind == "delivered"
    assert len(receiver.points()) == 1


@PROTOCOLS
def test_a_signals_own_endpoint_wins(
    receiver: Receiver, connect: Connect, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    own = start(receiver, protocol) + ("" if protocol == GRPC else "/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", own)
    transport = connect(f"http://127.0.0.1:{closed_port()}", protocol)

    outcomes = [transport.send(signal, BODY[signal]).kind for signal in ("traces", "metrics")]

    assert outcomes == ["delivered", "retry"]


def test_a_signals_own_protocol_wins(
    receiver: Receiver, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_PROTOCOL", "grpc")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_LOGS_ENDPOINT", receiver.start_grpc())
    transport = connect(receiver.start_http())

    outcomes = [transport.send(signal, BODY[signal]).kind for signal in SIGNALS]

    assert outcomes == ["delivered"] * 3
    assert {r.signal: "grpc" in r.headers["user-agent"] for r in receiver.requests} == {
        "metrics": False,
        "traces": False,
        "logs": True,
    }


@PROTOCOLS
def test_a_proxy_of_the_cluster_is_not_used_for_loopback(
    receiver: Receiver, connect: Connect, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    proxy = f"http://127.0.0.1:{closed_port()}"
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy)
    transport = connect(start(receiver, protocol), protocol)

    assert transport.send("metrics", BODY["metrics"]).kind == "delivered"


# ------------------------------------------------------------------- another host, and its secrets


def elsewhere(endpoint: str) -> str:
    """The same server by an address that is not that of loopback."""
    return endpoint.replace("127.0.0.1", "0.0.0.0")


PASSWORDS = "machine 0.0.0.0 login other password netrc\ndefault login other password netrc\n"


def test_a_netrc_never_replaces_the_configured_token(
    receiver: Receiver, connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / ".netrc"
    netrc.write_text(PASSWORDS)
    netrc.chmod(0o600)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(netrc))
    endpoint = elsewhere(receiver.start_http())
    for header in ("authorization=Bearer%20abc", ""):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", header)
        connect(endpoint).send("metrics", BODY["metrics"])

    sent = [request.headers.get("authorization") for request in receiver.requests]
    assert sent == ["Bearer abc", None]


@PROTOCOLS
@pytest.mark.parametrize(
    ("header", "expected"),
    [("x-team=ml", "Basic dXNlcjpwQHNz"), ("authorization=Bearer%20abc", "Bearer abc")],
)
def test_a_user_in_the_address_is_sent_unless_a_token_is_configured(
    receiver: Receiver,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
    header: str,
    expected: str,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", header)
    endpoint = start(receiver, protocol).replace("//", "//user:p%40ss@")

    connect(endpoint, protocol).send("metrics", BODY["metrics"])

    (request,) = receiver.requests
    assert request.headers["authorization"] == expected
    assert ("x-team" in request.headers) == ("x-team" in header)


@PROTOCOLS
def test_a_token_that_goes_to_another_host_unencrypted_is_warned_of_once(
    receiver: Receiver,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    protocol: str,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-api-key=canary,x-team=ml")
    here = start(receiver, protocol)
    there = elsewhere(here)
    for endpoint in (here, there):
        transport = connect(endpoint, protocol)
        for signal in SIGNALS:
            transport.send(signal, BODY[signal])

    assert caplog.messages == [
        f"OTEL_EXPORTER_OTLP_HEADERS: a token goes to {there} without encryption: use https://."
    ]


@PROTOCOLS
@pytest.mark.parametrize(
    ("header", "user", "message"),
    [
        ("", "user:canary@", "A password goes to {} without encryption: use https://."),
        ("x-scope-orgid=ml", "", None),
    ],
)
def test_what_is_a_secret_is_told_from_what_is_none(
    receiver: Receiver,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    protocol: str,
    header: str,
    user: str,
    message: str | None,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", header)
    endpoint = elsewhere(start(receiver, protocol))

    connect(endpoint.replace("//", f"//{user}"), protocol).send("metrics", BODY["metrics"])

    assert caplog.messages == ([message.format(endpoint)] if message else [])


@pytest.mark.parametrize(
    ("asked", "far", "encoding"),
    [("", True, "gzip"), ("none", True, None), ("deflate", True, "deflate"), ("", False, None)],
)
def test_what_goes_to_another_host_is_compressed_unless_asked_otherwise(
    receiver: Receiver,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    far: bool,
    encoding: str | None,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", asked)
    endpoint = receiver.start_http()

    connect(elsewhere(endpoint) if far else endpoint).send("metrics", BODY["metrics"])

    (request,) = receiver.requests
    assert request.headers.get("content-encoding") == encoding


def test_the_query_of_an_address_is_kept_behind_the_path(
    receiver: Receiver, connect: Connect
) -> None:
    transport = connect(receiver.start_http() + "/?tenant=1")

    outcomes = {transport.send(signal, BODY[signal]).kind for signal in SIGNALS}

    assert outcomes == {"delivered"}
    assert {request.query for request in receiver.requests} == {"tenant=1"}


def test_addresses_of_two_tenants_differ_and_do_not_show_the_query(connect: Connect) -> None:
    one, two, none = (
        connect(f"http://user:secret@c:4318{query}").address("metrics")
        for query in ("?tenant=1", "?tenant=2", "")
    )

    assert none == "http://c:4318/v1/metrics"
    assert len({one, two, none}) == 3
    assert "tenant" not in one + two


# --------------------------------------------------------------------------- TLS


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """Two self-signed certificates for this machine, made as people make them."""
    directory = tmp_path_factory.mktemp("tls")
    made = {}
    for name in ("server", "stranger"):
        certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
        subprocess.run(
            [
                *["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"],
                *("-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
                *("-keyout", str(key), "-out", str(certificate)),
            ],
            check=True,
            capture_output=True,
        )
        made[name] = (certificate, key)
    return made


Certificates = dict[str, tuple[Path, Path]]


@PROTOCOLS
def test_a_private_certificate_from_the_environment_is_trusted(
    receiver: Receiver,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    certificates: Certificates,
    protocol: str,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(certificates["server"][0]))
    transport = connect(start(receiver, protocol, tls=certificates["server"]), protocol)

    outcome = transport.send("metrics", BODY["metrics"])

    assert outcome.kind == "delivered", outcome.why


@PROTOCOLS
def test_with_a_certificate_of_another_host_nothing_is_sent(
    receiver: Receiver,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    certificates: Certificates,
    protocol: str,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(certificates["stranger"][0]))
    transport = connect(start(receiver, protocol, tls=certificates["server"]), protocol)

    outcome = transport.send("metrics", BODY["metrics"])

    assert outcome.kind == "retry"
    assert "certificate verify failed" in outcome.why
    assert receiver.attempts == []


def test_grpc_without_tls_towards_a_collector_with_it_is_kept_and_explained(
    receiver: Receiver, connect: Connect, certificates: Certificates
) -> None:
    endpoint = start(receiver, "grpc", tls=certificates["server"])
    transport = connect(endpoint.replace("https:", "http:"), "grpc")

    outcome = transport.send("metrics", BODY["metrics"])

    assert outcome.kind == "retry"
    assert "it may want https://" in outcome.why


@PROTOCOLS
def test_a_certificate_that_appears_later_is_used_then(
    receiver: Receiver,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    certificates: Certificates,
    tmp_path: Path,
    protocol: str,
) -> None:
    late = tmp_path / "ca.pem"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(late))
    transport = connect(start(receiver, protocol, tls=certificates["server"]), protocol)

    first = transport.send("metrics", BODY["metrics"])
    late.write_bytes(certificates["stranger"][0].read_bytes())
    second = transport.send("metrics", BODY["metrics"])
    late.write_bytes(certificates["server"][0].read_bytes())
    third = transport.send("metrics", BODY["metrics"])

    assert [first.kind, second.kind, third.kind] == ["retry", "retry", "delivered"]
    assert first.why.endswith(f"OTEL_EXPORTER_OTLP_CERTIFICATE: {late}: No such file or directory")


@PROTOCOLS
def test_tls_towards_a_collector_without_it_never_falls_back(
    receiver: Receiver, connect: Connect, protocol: str
) -> None:
    transport = connect(start(receiver, protocol).replace("http:", "https:"), protocol)

    outcome = transport.send("metrics", BODY["metrics"])

    assert outcome.kind == "retry"
    assert "TLS" in outcome.why
    assert receiver.attempts == []


# --------------------------------------------------------------------------- bad settings


@PROTOCOLS
@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zip"),
        ("OTEL_EXPORTER_OTLP_METRICS_COMPRESSION", ""),
        ("OTEL_EXPORTER_OTLP_HEADERS", "no-value,,=,secret"),
        ("OTEL_EXPORTER_OTLP_METRICS_HEADERS", ""),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=sec€ret"),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", ""),
        ("OTEL_EXPORTER_OTLP_METRICS_TIMEOUT", "10s"),
        ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", ""),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", ""),
        ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_CERTIFICATE", "/no/such"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "sideways"),
    ],
)
def test_a_malformed_variable_does_not_keep_data_from_going_out(
    receiver: Receiver,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    protocol: str,
    variable: str,
    text: str,
) -> None:
    monkeypatch.setenv(variable, text)
    transport = connect(start(receiver, protocol), protocol)

    outcomes = [transport.send("metrics", BODY["metrics"]) for _ in range(2)]

    assert [outcome.kind for outcome in outcomes] == ["delivered"] * 2
    # The agent has told it at its start.
    assert caplog.messages == []


@PROTOCOLS
@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://[::1"),
        ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://127.0.0.1:port"),
        ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization=sec%0Aret"),
    ],
)
def test_a_variable_that_cannot_work_is_an_outcome_and_no_exception(
    receiver: Receiver,
    connect: Connect,
    monkeypatch: pytest.MonkeyPatch,
    protocol: str,
    variable: str,
    text: str,
) -> None:
    monkeypatch.setenv(variable, text)
    transport = connect(start(receiver, protocol), protocol, timeout_s=2.0)

    outcome = transport.send("metrics", BODY["metrics"])

    assert outcome.kind == "retry", outcome.why
    assert "ret" not in outcome.why.replace("retry", "")
    assert outcome.why


def test_an_endpoint_without_a_scheme_is_explained(connect: Connect) -> None:
    transport = connect("collector:4318")

    assert transport.send("metrics", BODY["metrics"]).why == (
        "collector:4318/v1/metrics is no address of a collector; http://host:4318 would be one"
    )


def test_credentials_in_an_address_are_never_shown(connect: Connect) -> None:
    port = closed_port()
    transport = connect(f"http://user:secret@127.0.0.1:{port}")

    outcome = transport.send("metrics", BODY["metrics"])

    assert transport.destination == f"http://127.0.0.1:{port}"
    assert outcome.why == f"connection refused by http://127.0.0.1:{port}"


def test_log_lines_of_libraries_are_silenced(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for protocol in (HTTP, GRPC):
        transport = connect(f"http://127.0.0.1:{closed_port()}", protocol)
        transport.send("metrics", BODY["metrics"])

    noise = [r for r in caplog.records if r.name.startswith(("opentelemetry", "urllib3"))]
    assert noise == []


def test_a_closed_transport_says_so(receiver: Receiver, connect: Connect) -> None:
    transport = connect(receiver.start_http())
    transport.send("metrics", BODY["metrics"])

    transport.close()

    assert transport.send("metrics", BODY["metrics"]).kind == "retry"


# --------------------------------------------------------------------------- odd replies


class Reply:
    """Answers one request with exactly these bytes."""

    def __init__(self, reply: bytes) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._reply = reply
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Reply:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            seen = b""
            while not seen.endswith(BODY["metrics"]):
                seen += connection.recv(65536)
            try:
                connection.sendall(self._reply)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):
                    pass
            except OSError:
                return


HUGE = 50 * 1024 * 1024


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n\xff\xff\xff\xff\xff", "delivered"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\ncut off", "delivered"),
        (b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n", "delivered"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % HUGE + b"x" * HUGE, "delivered"),
        (b"HTTP/1.1 400 No\r\nContent-Length: %d\r\n\r\n" % HUGE + b"x" * HUGE, "refused"),
        # TLS ports answer http:// like this: the request was not read.
        (b"HTTP/1.0 400 Bad Request\r\n\r\n", "retry"),
        (
            b"HTTP/1.0 400 Bad Request\r\n\r\nClient sent an HTTP request to an HTTPS server.",
            "retry",
        ),
        (
            b"HTTP/1.1 400 Bad Request\r\nServer: nginx\r\n\r\n"
            b"The plain HTTP request was sent to HTTPS port",
            "retry",
        ),
        (b"HTTP/1.1 503 No\r\n\r\n", "retry"),
        (b"SSH-2.0-OpenSSH\r\n", "retry"),
    ],
)
def test_odd_replies_are_survived(connect: Connect, reply: bytes, kind: str) -> None:
    with Reply(reply) as server:
        transport = connect(server.endpoint)
        outcome = transport.send("metrics", BODY["metrics"])
        transport.close()

    assert outcome.kind == kind


class Drip:
    """Answers with a beginning, then with one small piece after the other."""

    PIECES = 1000

    def __init__(self, begin: bytes, piece: bytes) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._begin, self._piece = begin, piece
        self.client_closed = False
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> Drip:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        connection, _ = self._socket.accept()
        with connection:
            seen = b""
            while not seen.endswith(BODY["metrics"]):
                seen += connection.recv(65536)
            try:
                connection.sendall(self._begin)
                for _ in range(self.PIECES):
                    # The client sends nothing more: a readable socket means that it has closed.
                    if select.select([connection], [], [], 0.01)[0]:
                        self.client_closed = True
                        return
                    connection.sendall(self._piece)
            except OSError:
                self.client_closed = True


HEADERS = b" X\r\nContent-Type: text/plain\r\nContent-Length: 4000\r\n\r\n"


@pytest.mark.parametrize(("status", "kind"), [(b"200", "delivered"), (b"400", "refused")])
def test_a_body_that_drips_is_not_waited_for(connect: Connect, status: bytes, kind: str) -> None:
    with Drip(b"HTTP/1.1 " + status + HEADERS, b"x") as server:
        outcome = connect(server.endpoint, timeout_s=0.5).send("metrics", BODY["metrics"])

    assert server.client_closed
    # The status is known, and it counts.
    assert outcome.kind == kind


def test_a_collector_that_stops_reading_ends_the_attempt_at_the_timeout(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        transport = connect(f"http://127.0.0.1:{deaf.getsockname()[1]}", timeout_s=0.1)

        # More than the kernel buffers for a server that does not accept.
        outcome = transport.send("metrics", bytes(32 * 1024 * 1024))

    assert outcome.kind == "retry"
    assert outcome.why.endswith("within 0.1 s")


# --------------------------------------------------------------------------- on loopback


def test_a_collector_on_loopback_is_found(receiver: Receiver) -> None:
    endpoint = receiver.start_http()

    assert find_on_loopback({}, port=int(endpoint.rpartition(":")[2]), timeout_s=20) == endpoint
    assert receiver.points() == []


@pytest.mark.parametrize("mode", ["redirect", 404, 401, 503])
def test_something_else_on_the_port_is_no_collector(receiver: Receiver, mode: str | int) -> None:
    receiver.set_mode(mode)
    endpoint = receiver.start_http()

    assert find_on_loopback({}, port=int(endpoint.rpartition(":")[2]), timeout_s=20) is None


@contextlib.contextmanager
def another_user() -> Iterator[None]:
    """What is opened meanwhile belongs to another user."""
    if os.geteuid():
        pytest.skip("only root can be another user")
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_collector_of_another_user_is_not_found(receiver: Receiver) -> None:
    with another_user():
        endpoint = receiver.start_http()

    assert find_on_loopback({}, port=int(endpoint.rpartition(":")[2]), timeout_s=20) is None
    assert receiver.attempts == []


@PROTOCOLS
def test_a_collector_that_nobody_named_gets_no_configured_header(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, protocol: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20canary,x-team=ml")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-api-key=canary")
    port = int(start(receiver, protocol).rpartition(":")[2])
    ports = {HTTP: port, protocol: port}
    transport = Transport(settings.read(protocol=protocol), ports=ports)

    outcomes = {transport.send(signal, BODY[signal]).kind for signal in SIGNALS}
    transport.close()

    assert outcomes == {"delivered"}
    for request in receiver.requests:
        assert "canary" not in str(request.headers)
        assert "x-team" not in request.headers


@PROTOCOLS
def test_a_program_of_another_user_that_takes_over_the_port_gets_nothing(
    receiver: Receiver, protocol: str
) -> None:
    with another_user():
        endpoint = start(receiver, protocol)
    port = int(endpoint.rpartition(":")[2])
    transport = Transport(settings.read(protocol=protocol), ports={HTTP: port, protocol: port})

    outcome = transport.send("metrics", BODY["metrics"])
    transport.close()

    assert outcome == Outcome("retry", f"no collector of ours or of root at {endpoint}")
    assert receiver.attempts == []


def test_a_collector_of_another_user_is_named_as_the_reason_why_there_is_none(
    receiver: Receiver,
) -> None:
    with another_user():
        port = int(receiver.start_http().rpartition(":")[2])

    assert f"what listens on 127.0.0.1:{port} belongs to another user" in why_none(port)
    assert why_none(closed_port()) == "no collector is configured and none answers on loopback"


HEAD = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout\n"
)


def listening(address: str, uid: int, state: str = "0A") -> str:
    """A line of /proc/net/tcp, as a machine with this byte order has it."""
    packed = ip_address(address).packed
    words = [packed[at : at + 4] for at in range(0, len(packed), 4)]
    shown = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    rest = "0" * len(shown) + ":0000"
    return f"   0: {shown}:10DE {rest} {state} 00000000:00000000 00:00000000 00000000 {uid} 0 1 1\n"


@pytest.mark.parametrize(
    ("tcp", "tcp6", "trusted"),
    [
        ([("127.0.0.1", 0)], [], True),
        ([("0.0.0.0", os.geteuid())], [], True),
        ([], [("::", 0)], True),
        ([], [("::ffff:127.0.0.1", 0)], True),
        ([("127.0.0.1", 4242)], [], False),
        ([("0.0.0.0", 0), ("127.0.0.1", 4242)], [], False),
        ([("127.0.0.1", 0)], [("::", 4242)], False),
        # They take no connection to 127.0.0.1.
        ([("127.0.0.1", 0), ("10.0.0.1", 4242)], [("::1", 4242)], True),
        ([("10.0.0.1", 0)], [], False),
        ([], [], False),
        (None, None, False),
    ],
)
def test_only_a_listener_of_ours_or_of_root_is_trusted(
    tmp_path: Path,
    tcp: list[tuple[str, int]] | None,
    tcp6: list[tuple[str, int]] | None,
    trusted: bool,
) -> None:
    for name, sockets in (("tcp", tcp), ("tcp6", tcp6)):
        if sockets is not None:
            lines = [listening(*each) for each in sockets]
            # A connection is no listener.
            lines.append(listening("127.0.0.1", 4242, state="01"))
            (tmp_path / name).write_text(HEAD + "".join(lines))

    assert is_trusted(0x10DE, tmp_path) is trusted


def test_a_port_without_a_listener_is_no_collector() -> None:
    assert find_on_loopback({}, port=closed_port()) is None


def test_a_server_that_accepts_and_never_answers_is_no_collector(receiver: Receiver) -> None:
    receiver.set_mode("hang")
    endpoint = receiver.start_http()

    assert find_on_loopback({}, port=int(endpoint.rpartition(":")[2]), timeout_s=0.05) is None
