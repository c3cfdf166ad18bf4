"""The OpenTelemetry resource: what all data of this node is attached to."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from opentelemetry.sdk.resources import OTELResourceDetector, Resource

from otel_ddp import __version__, files

# Of what belongs to no project, and where the user names none.
_SERVICE = "otel-ddp"
_MOST_BYTES = 1 << 20
_NAMESPACE_FILE = "run/secrets/kubernetes.io/serviceaccount/namespace"


def describe(
    node: str, host: str, env: Mapping[str, str] = os.environ, root: Path = Path("/")
) -> dict[str, str]:
    """The resource attributes; those in OTEL_RESOURCE_ATTRIBUTES win."""
    ours = {
        "service.name": _SERVICE,
        # Not random: a restart would then start every series anew.
        "service.instance.id": node,
        "host.name": host,
        "host.arch": {"x86_64": "amd64", "aarch64": "arm64"}.get(
            platform.machine(), platform.machine()
        ),
        "os.type": "linux",
        # No SDK makes our data. So this name must not be "opentelemetry", says the specification.
        "telemetry.sdk.name": "otel_ddp",
        "telemetry.sdk.language": "python",
        "telemetry.sdk.version": __version__,
        **_kubernetes(env, host, root),
    }
    users = OTELResourceDetector().detect()
    merged = Resource(dict(ours)).merge(Resource(dict(users.attributes)))
    return {key: str(value) for key, value in merged.attributes.items()}


def with_project(resource: Mapping[str, str], project: str) -> dict[str, str]:
    """The resource of one project's series; a service that the user has named keeps its name."""
    if not project or resource.get("service.name") != _SERVICE:
        return dict(resource)
    return {**resource, "service.name": project}


def _kubernetes(env: Mapping[str, str], host: str, root: Path) -> dict[str, str]:
    if not env.get("KUBERNETES_SERVICE_HOST"):
        return {}
    found = {"k8s.pod.name": env.get("POD_NAME") or env.get("HOSTNAME") or host}
    if node := env.get("K8S_NODE_NAME") or env.get("NODE_NAME"):
        found["k8s.node.name"] = node
    # Of the system, which may have put a link there.
    file = (root / _NAMESPACE_FILE).resolve()
    namespace = files.read_text(file, _MOST_BYTES) or env.get("POD_NAMESPACE", "")
    return {**found, **({"k8s.namespace.name": namespace.strip()} if namespace.strip() else {})}
