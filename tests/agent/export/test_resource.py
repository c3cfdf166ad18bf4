"""The resource in a container, under Kubernetes, and with the user's variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from otel_ddp.agent.export.otlp import resource

CONTAINER = "3f4a" * 16


def test_the_resource_names_the_node_and_nothing_random(tmp_path: Path) -> None:
    first = resource.describe("n1", "host", {}, tmp_path)
    second = resource.describe("n1", "host", {}, tmp_path)

    assert first == second
    assert first["service.name"] == "otel-ddp"
    assert first["service.instance.id"] == "n1"
    assert first["host.name"] == "host"


def test_the_users_variables_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.namespace=own,team=vision%20lab")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "trainer")

    found = resource.describe("n1", "host", {}, tmp_path)

    assert found["service.name"] == "trainer"
    assert found["team"] == "vision lab"
    assert resource.with_project(found, "p")["service.namespace"] == "own"


def test_a_project_is_the_namespace(tmp_path: Path) -> None:
    found = resource.describe("n1", "host", {}, tmp_path)

    assert resource.with_project(found, "p")["service.namespace"] == "p"
    assert "service.namespace" not in resource.with_project(found, "")


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("cgroup", f"12:memory:/docker/{CONTAINER}"),
        ("cgroup", f"0::/kubepods.slice/pod1.slice/cri-containerd-{CONTAINER}.scope"),
        ("mountinfo", f"1 2 0:3 /var/lib/docker/containers/{CONTAINER}/hostname /etc/hostname rw"),
    ],
)
def test_a_container_is_recognised(tmp_path: Path, file: str, line: str) -> None:
    folder = tmp_path / "proc" / "self"
    folder.mkdir(parents=True)
    (folder / file).write_text(f"{line}\n")

    assert resource.describe("n", "h", {}, tmp_path)["container.id"] == CONTAINER


def test_kubernetes_names_pod_node_and_namespace(tmp_path: Path) -> None:
    secrets = tmp_path / "run" / "secrets" / "kubernetes.io" / "serviceaccount"
    secrets.mkdir(parents=True)
    (secrets / "namespace").write_text("team-a\n")
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "pod-7", "NODE_NAME": "gpu-3"}

    found = resource.describe("n", "h", env, tmp_path)

    assert found["k8s.pod.name"] == "pod-7"
    assert found["k8s.node.name"] == "gpu-3"
    assert found["k8s.namespace.name"] == "team-a"
