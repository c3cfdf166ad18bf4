"""The collector's configurations in the real collector, and what arrives in a real Prometheus."""

from __future__ import annotations

import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from tools.stack.build import Binaries
from tools.stack.server import NotUp

from node import Node, new_certificate, until
from otlp_receiver import Receiver
from stack.servers import CONFIGURATIONS, DEPLOY, Collector, Prometheus, Series, validated
from stack.test_rules import COLLECTORS

AGENT = CONFIGURATIONS / "agent.yaml"
GATEWAY = CONFIGURATIONS / "gateway.yaml"
ALL_IN_ONE = CONFIGURATIONS / "all-in-one.yaml"
REMOTE_WRITE = CONFIGURATIONS / "remote-write.yaml"

# What the comments at the head of each file call needed.
NEEDED = {
    (AGENT,): {"GATEWAY_URL": "https://127.0.0.1:4318", "GATEWAY_TOKEN": "secret"},
    (GATEWAY,): {"GATEWAY_TOKEN": "secret"},
    (ALL_IN_ONE,): {},
    (GATEWAY, REMOTE_WRITE): {"GATEWAY_TOKEN": "secret", "REMOTE_WRITE_URL": "http://127.0.0.1:1"},
    (ALL_IN_ONE, REMOTE_WRITE): {"REMOTE_WRITE_URL": "http://127.0.0.1:1"},
}
LOGS = 200
RUN = f"""
import otel_ddp
run = otel_ddp.init(group="g", run="r", job_type="train")
with run.span("setup"):
    run.event("began")
for step in range({LOGS}):
    run.log({{"loss": step * 0.5}}, step=step)
run.finish()
"""
LABELS = {"group": "g", "run": "r", "job_type": "train", "rank": "0", "local_rank": "0"}


def stem(configs: tuple[Path, ...]) -> str:
    return "+".join(config.stem for config in configs)


# Configurations by themselves


@pytest.mark.parametrize("configs", NEEDED, ids=stem)
def test_the_collector_accepts_each_configuration(
    binaries: Binaries, configs: tuple[Path, ...], tmp_path: Path
) -> None:
    status, words = validated(binaries, *configs, QUEUE_DIR=str(tmp_path), **NEEDED[configs])

    assert status == 0, words
    assert "deprecated" not in words


@pytest.mark.parametrize("path", [AGENT, GATEWAY, ALL_IN_ONE], ids=lambda path: path.stem)
def test_whatever_is_queued_lies_on_disk_is_never_given_up_and_keeps_its_order(path: Path) -> None:
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    sending = [each for name, each in config["exporters"].items() if name.startswith("otlp_")]

    assert sending
    for exporter in sending:
        assert exporter["retry_on_failure"]["max_elapsed_time"] == 0
        assert exporter["sending_queue"]["storage"] == "file_storage"
        assert exporter["sending_queue"]["num_consumers"] == 1
    for pipeline in config["service"]["pipelines"].values():
        assert pipeline["processors"] == ["memory_limiter"]


# Agent and gateway


def posted(
    url: str,
    body: bytes = b"",
    *,
    signal: str = "metrics",
    tls: dict[str, str] | None = None,
    token: str | None = None,
) -> int:
    """The status of a request; of an empty one, where there is no body."""
    headers = {"content-type": "application/x-protobuf"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    request = urllib.request.Request(f"{url}/v1/{signal}", data=body, headers=headers)
    trusting = ssl.create_default_context(cafile=tls["TLS_CERT_FILE"]) if tls else None
    try:
        with urllib.request.urlopen(request, timeout=60, context=trusting) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code


def assert_right(prometheus: Prometheus) -> None:
    """Every value once, each with a time of its own, in the order in which it was logged."""
    found = until(lambda: logged(prometheus), "all logged values in Prometheus")
    assert [value for _, value in found.points] == [step * 0.5 for step in range(LOGS)]
    assert found.labels.items() >= {**LABELS, "name": "loss", "split": "train"}.items()
    assert found.labels.keys() == {*(*LABELS, "node", "name", "split"), *("job", "instance")}
    # Another kind of metric, with a suffix that is made of unit and type.
    until(lambda: prometheus.query("training_heartbeat_timestamp_seconds"), "the heartbeat")


def logged(prometheus: Prometheus) -> Series | None:
    found = prometheus.raw('training_scalar{name="loss"}[1h]')
    return next((each for each in found if len(each.points) >= LOGS), None)


def test_what_is_logged_arrives_through_agent_and_gateway_which_takes_nothing_from_strangers(
    binaries: Binaries, tmp_path: Path
) -> None:
    new_certificate(tmp_path, "tls")
    tls = {"TLS_CERT_FILE": str(tmp_path / "tls.crt"), "TLS_KEY_FILE": str(tmp_path / "tls.key")}
    with ExitStack() as life:
        prometheus = life.enter_context(Prometheus(binaries, tmp_path / "prometheus"))
        gateway = life.enter_context(
            Collector(
                *(binaries, tmp_path / "gateway", GATEWAY),
                scheme="https",
                GATEWAY_TOKEN="secret",
                METRICS_URL=prometheus.otlp_metrics,
                **tls,
            )
        )
        agent = life.enter_context(
            Collector(
                *(binaries, tmp_path / "agent", AGENT),
                GATEWAY_URL=gateway.http,
                GATEWAY_TOKEN="secret",
                GATEWAY_CA_FILE=tls["TLS_CERT_FILE"],
            )
        )
        node = life.enter_context(Node())
        node.export_to(agent.http)
        node.run(RUN)

        assert_right(prometheus)
        assert posted(gateway.http, tls=tls, token="secret") == 200
        assert posted(gateway.http, tls=tls, token="wrong") == 401
        assert posted(gateway.http, tls=tls, token=None) == 401
        assert posted(gateway.http.replace("https", "http"), token="secret") == 400
    protocols = yaml.safe_load(GATEWAY.read_text())["receivers"]["otlp"]["protocols"]
    # So gRPC asks for as much.
    for part in ("auth", "tls"):
        assert protocols["grpc"][part] == protocols["http"][part]

    # Without a certificate of its own it does not start.
    bare = Collector(binaries, tmp_path / "bare", GATEWAY, GATEWAY_TOKEN="secret")
    with pytest.raises(NotUp, match=r"/etc/otelcol/tls/tls\.crt: no such file"):
        bare.start()


def one_point() -> bytes:
    request = metrics_service_pb2.ExportMetricsServiceRequest()
    metric = request.resource_metrics.add().scope_metrics.add().metrics.add(name="up")
    metric.gauge.data_points.add(time_unix_nano=time.time_ns(), as_int=1)
    return request.SerializeToString()


# The collector's own numbers


@contextmanager
def watching(binaries: Binaries, folder: Path, collector: Collector) -> Iterator[Prometheus]:
    """Prometheus as it is deployed, with the rules on collectors alone, and in a hurry."""
    folder.mkdir()
    rules = (DEPLOY / "prometheus" / "rules" / "collector.yml").read_text()
    (folder / "rules.yml").write_text(rules.replace("interval: 30s", "interval: 1s"))
    targets = [{"targets": [collector.telemetry.split("/")[2]]}]
    (folder / "collectors").mkdir()
    (folder / "collectors" / "here.yml").write_text(yaml.safe_dump(targets))
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"]["scrape_interval"] = "1s"
    config["rule_files"] = ["rules.yml"]
    with Prometheus(binaries, folder, config=yaml.safe_dump(config)) as prometheus:
        yield prometheus


def test_what_backends_refuse_is_counted_under_the_names_that_the_rules_ask_for(
    binaries: Binaries, tmp_path: Path
) -> None:
    span, record = (
        trace_service_pb2.ExportTraceServiceRequest(),
        logs_service_pb2.ExportLogsServiceRequest(),
    )
    span.resource_spans.add().scope_spans.add().spans.add(trace_id=b"t" * 16, span_id=b"s" * 8)
    record.resource_logs.add().scope_logs.add().log_records.add(severity_number=9)
    with (
        Receiver() as backend,
        Collector(
            *(binaries, tmp_path / "collector", ALL_IN_ONE),
            METRICS_URL=f"{(url := backend.start_http())}/v1/metrics",
            TRACES_EXPORTER="otlp_grpc/traces",
            TRACES_ENDPOINT=backend.start_grpc(),
            LOGS_EXPORTER="otlp_http/logs",
            LOGS_URL=f"{url}/v1/logs",
        ) as collector,
        watching(binaries, tmp_path / "prometheus", collector) as prometheus,
    ):
        backend.set_mode(400)
        for signal, body in (
            ("metrics", one_point()),
            ("traces", span.SerializeToString()),
            ("logs", record.SerializeToString()),
        ):
            assert posted(collector.http, body, signal=signal) == 200

        def recorded(name: str) -> dict[str, float]:
            found = prometheus.query(name)
            return {each.labels.get("exporter", ""): each.value for each in found}

        failed = "collector:otelcol_exporter_send_failed:sum"
        until(lambda: sum(recorded(failed).values()) == 3, "all three to be counted")

        exporters = ("otlp_http/metrics", "otlp_grpc/traces", "otlp_http/logs")
        assert recorded(failed) == dict.fromkeys(exporters, 1)
        assert recorded("collector:otelcol_exporter_sent:sum") == dict.fromkeys(exporters, 0)
        assert recorded("collector:otelcol_exporter_queue:used_ratio").keys() == {*exporters}
        assert recorded("collector:otelcol_receiver_refused:sum") == {"": 0}
        named = {each.name: each.labels for each in prometheus.query('{__name__=~"otelcol_.*"}')}
    for name, labels in COLLECTORS.items():
        assert labels <= named[name].keys(), name
