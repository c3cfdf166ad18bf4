"""The resource of a node, under Kubernetes, and with the user's variables."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.semconv.schemas import Schemas

import conventions
from otel_ddp.agent.export.otlp import resource
from otel_ddp.agent.export.otlp.encode import SCHEMA_URL


def test_the_users_variables_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=own,team=vision%20lab")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "trainer")

    found = resource.describe("n1", "host", {}, tmp_path)

    assert found["team"] == "vision lab"
    of_project = resource.with_project(found, "p")
    assert (of_project["service.name"], of_project["service.namespace"]) == ("trainer", "own")


def test_a_project_is_the_service(tmp_path: Path) -> None:
    found = resource.describe("n1", "host", {}, tmp_path)

    assert resource.with_project(found, "p")["service.name"] == "p"
    assert resource.with_project(found, "")["service.name"] == "otel-ddp"


def test_every_attribute_is_one_of_the_conventions(tmp_path: Path) -> None:
    found = resource.describe("n1", "host", {}, tmp_path)

    assert found.keys() <= conventions.attributes()
    assert found["telemetry.sdk.language"] in conventions.values()["telemetry.sdk.language"]
    assert found["telemetry.sdk.name"] == "otel_ddp"


def test_the_schema_is_that_of_the_conventions_that_we_test_against() -> None:
    assert [*Schemas][-1].value == SCHEMA_URL


def test_kubernetes_names_pod_node_and_namespace(tmp_path: Path) -> None:
    secrets = tmp_path / "run" / "secrets" / "kubernetes.io" / "serviceaccount"
    secrets.mkdir(parents=True)
    (secrets / "namespace").write_text("team-a\n")
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "pod-7", "NODE_NAME": "gpu-3"}

    found = resource.describe("n", "h", env, tmp_path)

    assert found["k8s.pod.name"] == "pod-7"
    assert found["k8s.node.name"] == "gpu-3"
    assert found["k8s.namespace.name"] == "team-a"
