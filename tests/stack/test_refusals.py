"""A gateway that refuses what nodes send: said once, no trouble for trainings, nothing lost."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

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

    def assert_said(self, protocol: str, why: str) -> None:
        """One sentence in the status, after some tries in vain."""
        node = self.nodes[protocol]

        def tried() -> bool:
            return (node.value("otel_ddp_exports_total", outcome="failed") or 0.0) >= TRIES

        until(tried, f"{TRIES} tries over {protocol}")
        until(lambda: str(node.agent()["export"]).startswith(f"{why} since "), why)
        assert str(node.agent()["export"]).endswith(" wait on disk")

    def assert_logged_once(self, protocol: str, why: str) -> None:
        """The same in the only line of the log, and nothing is lost."""
        node = self.nodes[protocol]
        lines = node.place.agent_log.read_text().splitlines()
        (line,) = (each for each in lines if ": serving http" not in each)
        assert f": {why}; " in line
        assert " wait on disk" in line
        dropped = node.series("otel_ddp_points_dropped_total")
        assert [each for each in dropped if each[1]] == []

    def assert_arrives(self, prometheus: Prometheus) -> None:
        wait_for(prometheus, *self.trainings)
        assert_all_there(prometheus, self.trainings)


def test_what_a_gateway_refuses_is_said_once_and_waits_until_the_mistake_is_mended(
    binaries: Binaries, tmp_path: Path
) -> None:
    expired, renewed = signed(tmp_path / "expired", -1), signed(tmp_path / "renewed", 2)
    with (
        Prometheus(binaries, tmp_path / "prometheus") as prometheus,
        ExitStack() as life,
    ):
        gateway = Gateway(binaries, tmp_path / "gateway", prometheus)
        with gateway(**expired.env):
            refused = Refused(tmp_path, life, gateway.url, expired, TOKEN)

            for protocol in PROTOCOLS:
                why = (
                    f"TLS to {gateway.url(protocol)} failed: certificate verify failed: "
                    "certificate has expired"
                )
                refused.assert_said(protocol, why)
                refused.assert_logged_once(protocol, why)

        renewed.certificate.replace(expired.certificate)
        env = renewed._replace(certificate=expired.certificate).env
        with gateway(GATEWAY_TOKEN="another", **env):
            rejected = "token rejected (OTEL_EXPORTER_OTLP_HEADERS)"
            http, grpc = map(gateway.url, PROTOCOLS)
            refused.assert_said("http/protobuf", f"401 from {http}/v1/metrics: {rejected}")
            refused.assert_said("grpc", f"UNAUTHENTICATED from {grpc}: {rejected}")

        with gateway(**env):
            refused.assert_arrives(prometheus)
