"""The OpenTelemetry resource: what all data of this node is attached to."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path

from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from otel_ddp import __version__

_CONTAINER_ID = re.compile(r"(?:^|[/-])([0-9a-f]{64})(?:\.scope)?(?:$|[/\s])")
_NAMESPACE_FILE = "run/secrets/kubernetes.io/serviceaccount/namespace"


def describe(
    node: str, host: str, env: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> dict[str, str]:
    """The resource attributes; those in OTEL_RESOURCE_ATTRIBUTES win."""
    ours = {
        "service.name": "otel-ddp",
        "service.version": __version__,
        # Not random: a restart would then start every series anew.
        "service.instance.id": node,
        "host.name": host,
        "host.arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(
            platform.machine(), platform.machine()
        ),
        "os.type": "linux",
        **_container(root),
        **_kubernetes(env, host, root),
    }
    users = OTELResourceDetector().detect()
    merged = Resource(dict(ours)).merge(Resource(dict(users.attributes)))
    return {key: str(value) for key, value in merged.attributes.items()}


def with_project(resource: Mapping[str, str], project: str) -> dict[str, str]:
    """The resource of one project's series; a namespace that the user has set stays."""
    if not project or "service.namespace" in resource:
        return dict(resource)
    return {**resource, "service.namespace": project}


def _container(root: Path) -> dict[str, str]:
    # cgroup v1 names the container in the first file; v2 only in the paths of its mounts.
    for name in ("proc/self/cgroup", "proc/self/mountinfo"):
        try:
            text = (root / name).read_text(errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            if name.endswith("mountinfo") and "/containers/" not in line:
                continue
            if found := _CONTAINER_ID.search(line):
                return {"container.id": found.group(1)}
    return {}


def _kubernetes(env: Mapping[str, str], host: str, root: Path) -> dict[str, str]:
    if not env.get("KUBERNETES_SERVICE_HOST"):
        return {}
    found = {"k8s.pod.name": env.get("POD_NAME") or env.get("HOSTNAME") or host}
    if node := env.get("K8S_NODE_NAME") or env.get("NODE_NAME"):
        found["k8s.node.name"] = node
    try:
        found["k8s.namespace.name"] = (root / _NAMESPACE_FILE).read_text().strip()
    except OSError:
        if namespace := env.get("POD_NAMESPACE"):
            found["k8s.namespace.name"] = namespace
    return found
