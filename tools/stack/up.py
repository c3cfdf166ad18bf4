"""Runs collector, Prometheus and, where they are found, Loki and Grafana until it is stopped."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from tools.stack import grafana, loki
from tools.stack.build import ROOM, Binaries
from tools.stack.grafana import copied
from tools.stack.server import NotUp, Server, environment, next_free

ROOT = Path(__file__).parents[2]
_DEPLOY = ROOT / "deploy"


class Addresses(NamedTuple):
    """The addresses of the servers; empty without Grafana or Loki."""

    collector: str
    prometheus: str
    grafana: str
    loki: str

    def lines(self) -> Iterator[str]:
        yield f"collector   {self.collector}   OTEL_EXPORTER_OTLP_ENDPOINT={self.collector}"
        yield f"Prometheus  {self.prometheus}"
        none = "none found: put it on the PATH, or name its binary in"
        yield f"Grafana     {self.grafana or f'{none} GRAFANA'}"
        yield f"Loki        {self.loki or f'{none} LOKI'}"


class Ports(NamedTuple):
    """The port of each server if it is free: the usual one."""

    prometheus: int = 9090
    otlp_grpc: int = 4317
    otlp_http: int = 4318
    health: int = 13133
    telemetry: int = 8888
    grafana: int = 3000
    loki: int = 3100

    def still_free(self, say: Callable[[str], None]) -> Ports:
        """These ports, or the next free ones."""
        given: list[int] = []
        for name, usual in self._asdict().items():
            port = next_free(usual)
            while port in given:
                port = next_free(port + 1)
            given.append(port)
            if port != usual:
                say(f"stack: port {usual} is taken: {name} has {port}")
        return Ports(*given)


@contextmanager
def up(
    binaries: Binaries,
    room: Path = ROOM,
    say: Callable[[str], None] = print,
    usual: Ports | None = None,
) -> Iterator[Addresses]:
    """Runs the stack during the block."""
    data = room / "data"
    data.mkdir(parents=True, exist_ok=True)
    with ExitStack() as ending, (room / "running").open("w") as running:
        try:
            # A lock, which the kernel drops however the process ends.
            fcntl.flock(running, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotUp("another process runs it already") from None
        ports = (usual or Ports()).still_free(say)
        prometheus, prometheus_url = _prometheus(binaries, data, ports)
        servers, loki_url, grafana_url = [prometheus], "", ""
        if (loki_binary := loki.found()) is not None:
            server, loki_url = loki.server(loki_binary, data / "loki", ports.loki)
            servers.append(server)
        collector, collector_url = _collector(binaries, data, ports, prometheus_url, loki_url)
        servers.append(collector)
        if (grafana_binary := grafana.found()) is not None:
            server, grafana_url = grafana.server(
                *(grafana_binary, data / "grafana", ports.grafana),
                *(prometheus_url, loki_url or f"http://127.0.0.1:{ports.loki}"),
            )
            servers.append(server)
        for server in servers:
            ending.enter_context(server)
            say(f"stack: {server.name} is up, its log is {server.log}")
        yield Addresses(collector_url, prometheus_url, grafana_url, loki_url)


def _prometheus(binaries: Binaries, data: Path, ports: Ports) -> tuple[Server, str]:
    url = f"http://127.0.0.1:{ports.prometheus}"
    configuration = copied(_DEPLOY / "prometheus", data / "prometheus.conf")
    # As deployed, but for the collector's port (YAML is a superset of JSON).
    collectors = [{"targets": [f"127.0.0.1:{ports.telemetry}"]}]
    (configuration / "collectors" / "local.yml").write_text(json.dumps(collectors))
    command = [
        str(binaries.prometheus),
        f"--config.file={configuration / 'prometheus.yml'}",
        f"--storage.tsdb.path={data / 'prometheus'}",
        f"--web.listen-address=127.0.0.1:{ports.prometheus}",
        "--web.enable-otlp-receiver",
    ]
    log = data / "prometheus.log"
    server = Server("Prometheus", command, ready=f"{url}/-/ready", log=log, env=environment())
    return server, url


def _collector(
    binaries: Binaries, data: Path, ports: Ports, prometheus: str, loki_url: str
) -> tuple[Server, str]:
    to_loki = {"LOGS_EXPORTER": "otlp_http/logs", "LOGS_URL": f"{loki_url}/otlp/v1/logs"}
    server = Server(
        "collector",
        [str(binaries.collector), "--config", str(_DEPLOY / "otel-collector" / "all-in-one.yaml")],
        ready=f"http://127.0.0.1:{ports.health}",
        log=data / "collector.log",
        env={
            **(to_loki if loki_url else {}),
            # What the user sets for traces and logs goes through.
            **environment(),
            "METRICS_URL": f"{prometheus}/api/v1/otlp/v1/metrics",
            "QUEUE_DIR": str(data / "queue"),
            "OTLP_GRPC_PORT": str(ports.otlp_grpc),
            "OTLP_HTTP_PORT": str(ports.otlp_http),
            "HEALTH_PORT": str(ports.health),
            "TELEMETRY_PORT": str(ports.telemetry),
        },
    )
    return server, f"http://127.0.0.1:{ports.otlp_http}"
