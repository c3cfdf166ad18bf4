"""What Kubernetes knows: schemas, and the manifests that they are held against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from extras import needed

# The oldest has sidecars first; the newest is the last that kubernetes-validate has.
KUBERNETES_VERSIONS = ("1.29", "1.37")
# Whose resources are no part of Kubernetes.
OPERATORS = (
    *("monitoring.coreos.com", "kubeflow.org", "trainer.kubeflow.org"),
    *("jobset.x-k8s.io", "batch.volcano.sh"),
)

Manifest = dict[str, Any]


def check(manifest: Manifest, version: str) -> None:
    """Raises if this version of Kubernetes does not know a field or a value of it or its pods."""
    validate = needed("kubernetes_validate", "schemas").validate
    theirs = manifest["apiVersion"].partition("/")[0] in OPERATORS
    for each in pod_templates(manifest) if theirs else [manifest]:
        validate(each, version, strict=True)


def _mappings(within: Any) -> Iterator[Manifest]:
    if isinstance(within, dict):
        yield within
    below: Iterable[Any] = within.values() if isinstance(within, dict) else within
    for each in below:
        if isinstance(each, dict | list):
            yield from _mappings(each)


def pod_templates(manifest: Manifest) -> list[Manifest]:
    """Every template of pods in a resource of any kind, as one that Kubernetes can check."""
    return [
        {
            "apiVersion": "v1",
            "kind": "PodTemplate",
            "metadata": {"name": manifest["metadata"]["name"]},
            "template": each,
        }
        for each in _mappings(manifest)
        if "containers" in (each.get("spec") or {})
    ]
