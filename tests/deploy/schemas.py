"""What Kubernetes and the operators know: schemas, and the manifests that they are held against."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import yaml

import go_modules
from extras import needed

# The oldest has sidecars first; the newest is the last that kubernetes-validate has.
KUBERNETES_VERSIONS = ("1.29", "1.33", "1.37")

Manifest = dict[str, Any]

# Whose resources these are, and where their definitions lie among Go modules.
DEFINITIONS = {
    "monitoring.coreos.com": (
        "github.com/prometheus-operator/prometheus-operator@v0.85.0",
        "example/prometheus-operator-crd",
    ),
    "kubeflow.org": ("github.com/kubeflow/training-operator@v1.8.1", "manifests/base/crds"),
    "trainer.kubeflow.org": ("github.com/kubeflow/trainer/v2@v2.0.0", "manifests/base/crds"),
    "jobset.x-k8s.io": ("sigs.k8s.io/jobset@v0.12.0", "config/components/crd/bases"),
    "batch.volcano.sh": ("volcano.sh/volcano@v1.15.1", "config/crd/volcano/bases"),
}


class _Loader(yaml.CSafeLoader):
    """Quick, for files of a megabyte; and to it, as to Kubernetes, `=` is a text."""


_Loader.add_constructor("tag:yaml.org,2002:value", yaml.CSafeLoader.construct_yaml_str)


def of_an_operator(manifest: Manifest) -> bool:
    return manifest["apiVersion"].partition("/")[0] in DEFINITIONS


def check_with_kubernetes(manifest: Manifest, version: str) -> None:
    """Raises if this version of Kubernetes does not know a field or a value."""
    validate = needed("kubernetes_validate", "schemas").validate
    validate(manifest, version, strict=True)


def check_with_operator(manifest: Manifest) -> None:
    """The same for a resource that an operator has defined; fetches its definition."""
    jsonschema = needed("jsonschema", "dev")
    group, _, version = manifest["apiVersion"].partition("/")
    schema = _definition(group, manifest["kind"], version)

    jsonschema.Draft202012Validator(schema).validate(manifest)


@cache
def _definition(group: str, kind: str, version: str) -> Manifest:
    module, where = DEFINITIONS[group]
    path = go_modules.folder(module) / where / f"{group}_{kind.lower()}s.yaml"
    (definition,) = (each for each in yaml.load_all(path.read_text(), Loader=_Loader) if each)
    (found,) = (each for each in definition["spec"]["versions"] if each["name"] == version)
    return _strict(found["schema"]["openAPIV3Schema"])


def _strict(schema: Manifest) -> Manifest:
    """Refuses what the API server would drop without a word: a field with a typo."""
    schema = copy.deepcopy(schema)
    for each in _mappings(schema):
        open_ended = each.get("x-kubernetes-preserve-unknown-fields")
        if isinstance(each.get("properties"), dict) and not open_ended:
            each.setdefault("additionalProperties", False)
    # The server knows the fields of every resource's metadata.
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


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
