"""A gateway that refuses what nodes send: said once, no trouble for trainings, nothing lost."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest
from tools.stack.build import Binaries
from tools.stack.server import free_port

from node import Node, until
from stack.servers import CONFIGURATIONS, Collector, Prometheus
from stack.trainings import Training, assert_all_there, wait_for

PROTOCOLS = ("http/protobuf", "grpc")
TOKEN = "secret"
STEPS = 200
# So often each agent has tried in vain before the mistake is mended.
TRIES = 3


class Tls(NamedTuple):
    """A certificate, which is its own authority, and its key."""

    certificate: Path
    key: Path

    @property
    def env(self) -> dict[str, str]:
        return {"TLS_CERT_FILE": str(self.certificate), "TLS_KEY_FILE": str(self.key)}


def signed(folder: Path, days: int) -> Tls:
    """For loopback, valid for so many days from now; below 0 it has expired."""
    folder.mkdir()
    tls = Tls(folder / "tls.crt", folder / "tls.key")
    request, names = folder / "request", folder / "names"
    names.write_text("subjectAltName=IP:127.0.0.1\n")
    for command in (
        ["req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=gateway", "-keyout", tls.key],
        ["x509", "-req", "-in", request, "-signkey", tls.key, "-days", days, "-extfile", names],
    ):
        out = tls.certificate if command[0] == "x509" else request
        subprocess.run(
            ["openssl", *map(str, command), "-out", str(out)], check=True, capture_output=True
        )
    return tls


class Gateway:
    """One address, behind which the gateway is started with one setting after the other."""

    def __init__(self, binaries: Binaries, folder: Path, prometheus: Prometheus) -> None:
        self._binaries, self._folder = binaries, folder
        self._env = {
            "METRICS_URL": prometheus.otlp_metrics,
            "GATEWAY_TOKEN": TOKEN,
            "OTLP_HTTP_PORT": str(free_port()),
            "OTLP_GRPC_PORT": str(free_port()),
        }

    def __call__(self, config: str = "gateway", **env: str) -> Collector:
        path = CONFIGURATIONS / f"{config}.yaml"
        return Collector(self._binaries, self._folder, path, **{**self._env, **env})

    def url(self, protocol: str, scheme: str = "https") -> str:
        name = "OTLP_GRPC_PORT" if protocol == "grpc" else "OTLP_HTTP_PORT"
        return f"{scheme}://127.0.0.1:{self._env[name]}"


@pytest.fixture
def prometheus(binaries: Binaries, tmp_path: Path) -> Iterator[Prometheus]:
    with Prometheus(binaries, tmp_path / "prometheus") as server:
        yield server


@pytest.fixture
def gateway(binaries: Binaries, tmp_path: Path, prometheus: Prometheus) -> Gateway:
    return Gateway(binaries, tmp_path / "gateway", prometheus)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return signed(tmp_path_factory.mktemp("tls") / "valid", days=2)


class Refused:
    """A node for each protocol, whose trainings have ended while the gateway took nothing."""

    def __init__(
        self, folder: Path, life: ExitStack, url: Callable[[str], str], trust: Tls, token: str
    ) -> None:
        self.trainings: list[Training] = []
        self.nodes: dict[str, Node] = {}
        for protocol in PROTOCOLS:
            name = protocol.partition("/")[0]
            node = life.enter_context(
                Node(
                    OTEL_DDP_NODE=name,
                    OTEL_EXPORTER_OTLP_PROTOCOL=protocol,
                    OTEL_EXPORTER_OTLP_CERTIFICATE=str(trust.certificate),
                    OTEL_EXPORTER_OTLP_HEADERS=f"authorization=Bearer%20{token}",
                )
            )
            node.export_to(url(protocol))
            training = Training(folder / name, {name: node}, group="g", run=name, job_type="train")
            training.log(STEPS)
            self.nodes[protocol] = node
            self.trainings.append(training)
        for training in self.trainings:
            training.goes_on(STEPS - training.steps())
            # It comes to a good end, and nothing was said to its user.
            assert training.end() == [""] * len(training.labels)

    def said(self, protocol: str) -> tuple[str, list[str]]:
        """What the status says, and all that the log says, after some tries in vain."""
        node = self.nodes[protocol]

        def tried() -> bool:
            return (node.value("otel_ddp_exports_total", outcome="failed") or 0.0) >= TRIES

        until(tried, f"{TRIES} tries over {protocol}")
        state = str(node.agent()["export"])
        lines = node.place.agent_log.read_text().splitlines()
        return state, [line for line in lines if ": serving http" not in line]

    def assert_said_once(self, protocol: str, why: str) -> None:
        """One sentence in the status, the same in one line of the log, and all of it kept."""
        state, lines = self.said(protocol)

        assert state.startswith(f"{why} since ")
        assert state.endswith(" wait on disk")
        (line,) = lines
        assert " wait on disk" in line
        # Said of whichever signal is refused first.
        assert any(
            f"otel-ddp agent: OTLP {signal}: {why.replace('/v1/metrics', f'/v1/{signal}')}; "
            in line
            for signal in ("metrics", "traces", "logs")
        )
        dropped = self.nodes[protocol].series("otel_ddp_points_dropped_total")
        assert [each for each in dropped if each[1]] == []

    def assert_arrives(self, prometheus: Prometheus) -> None:
        wait_for(prometheus, *self.trainings)
        assert_all_there(prometheus, self.trainings)


@pytest.fixture
def life() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_rejected_token_is_said_once_and_what_was_logged_waits_for_the_right_one(
    gateway: Gateway, prometheus: Prometheus, valid: Tls, tmp_path: Path, life: ExitStack
) -> None:
    with gateway(GATEWAY_TOKEN="another", **valid.env):
        refused = Refused(tmp_path, life, gateway.url, valid, TOKEN)

        rejected = "token rejected (OTEL_EXPORTER_OTLP_HEADERS)"
        http, grpc = map(gateway.url, PROTOCOLS)
        refused.assert_said_once("http/protobuf", f"401 from {http}/v1/metrics: {rejected}")
        refused.assert_said_once("grpc", f"UNAUTHENTICATED from {grpc}: {rejected}")

    with gateway(**valid.env):
        refused.assert_arrives(prometheus)


def test_an_expired_certificate_is_said_once_and_what_was_logged_waits_for_a_valid_one(
    gateway: Gateway, prometheus: Prometheus, tmp_path: Path, life: ExitStack
) -> None:
    tls = signed(tmp_path / "tls", days=-1)
    with gateway(**tls.env):
        refused = Refused(tmp_path, life, gateway.url, tls, TOKEN)

        for protocol in PROTOCOLS:
            refused.assert_said_once(
                protocol,
                f"TLS to {gateway.url(protocol)} failed: certificate verify failed: "
                "certificate has expired",
            )

    renewed = signed(tmp_path / "renewed", days=2)
    renewed.certificate.replace(tls.certificate)
    with gateway(**renewed._replace(certificate=tls.certificate).env):
        refused.assert_arrives(prometheus)
