"""The chart of deploy/: the manifests of deploy/kubernetes, with what a cluster sets in them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml

import go_modules
import otel_ddp
from deploy import schemas
from deploy.files import DEPLOY, GUIDE, KUBERNETES, documents, environment, parsed
from deploy.schemas import Manifest
from extras import needed

HELM = "helm.sh/helm/v4@v4.3.1/cmd/helm"
VALUES: Manifest = yaml.safe_load((DEPLOY / "values.yaml").read_text())
SCHEMA: Manifest = json.loads((DEPLOY / "values.schema.json").read_text())
# The manifests' own image and namespaces, so that nothing but the values' effect differs.
IMAGE = "registry.example.org/otel-ddp-agent:0.1.0"
DAEMONSET = {"kind": "DaemonSet", "image": IMAGE}
SCRAPED = {"OTEL_EXPORTER_PROMETHEUS_HOST": "0.0.0.0", "OTEL_DDP_SCRAPE_TOKEN_FILE": "insecure"}

# What clusters set.
CLUSTERS: dict[str, Manifest] = {
    "as-it-is": {},
    "daemonset": {"agent": DAEMONSET},
    "operator": {
        "prometheus": {"operator": True, "labels": {"release": "kube-prometheus-stack"}},
        "agent": {**DAEMONSET, "env": SCRAPED},
    },
    "own-collector": {
        "collector": {"enabled": False},
        "agent": {**DAEMONSET, "endpoint": "http://collector.monitoring.svc:4318"},
        "grafana": {"dashboards": False},
    },
    "all-of-the-collector": {
        "collector": {
            "image": "registry.example.org:5000/otelcol@sha256:" + 64 * "0",
            "replicas": 3,
            "env": {
                "METRICS_URL": "https://mimir.example.org/otlp/v1/metrics",
                "QUEUE_BYTES": "8589934592",
                "GOMEMLIMIT": "2560MiB",
            },
            "storage": "50Gi",
            "resources": {"requests": {"cpu": 1, "memory": "4Gi"}, "limits": {"memory": "4Gi"}},
            "pod": {
                "imagePullSecrets": [{"name": "registry"}],
                "topologySpreadConstraints": [],
            },
        },
        "prometheus": {"namespace": "mimir"},
    },
}
for_each_cluster = pytest.mark.parametrize("cluster", CLUSTERS)


# -- what needs no Helm


@for_each_cluster
def test_the_schema_takes_what_clusters_set(cluster: str) -> None:
    jsonschema = needed("jsonschema", "dev")

    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for values in (VALUES, CLUSTERS[cluster]):
        jsonschema.validate(values, SCHEMA)


@pytest.mark.parametrize(
    "values",
    [
        {"agent": {"kind": "Sidecar"}},
        {"agent": {"endpoint": "collector:4318"}},
        {"agent": {"pod": {"nodeselector": {}}}},
        {"collector": {"env": {"QUEUE_BYTES": 1}}},
    ],
    ids=str,
)
def test_the_schema_takes_no_other(values: Manifest) -> None:
    jsonschema = needed("jsonschema", "dev")

    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values, SCHEMA)


def test_the_schema_knows_the_variables_of_the_gateway() -> None:
    known = set(SCHEMA["properties"]["collector"]["properties"]["env"]["properties"])
    read = set(
        re.findall(r"\$\{env:(\w+)", (DEPLOY / "otel-collector" / "gateway.yaml").read_text())
    )
    # Where the manifest has its ports, its disk and its Secrets.
    fixed = {each for each in read if each.endswith(("_PORT", "_HOST", "_FILE", "_DIR", "_TOKEN"))}

    assert known == (read - fixed) | {"GOMEMLIMIT", "TLS_CLIENT_CA_FILE"}


def test_the_chart_has_the_version_of_the_package() -> None:
    (chart,) = documents(DEPLOY / "Chart.yaml")

    assert chart["version"] == otel_ddp.__version__


# -- Helm itself


def helm(*arguments: str | Path) -> str:
    status, told = go_modules.run(HELM, *arguments)
    assert status == 0, told
    return told


def written(folder: Path, values: Manifest) -> Path:
    path = folder / "values.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[Manifest]]:
    """What the chart makes for a cluster."""

    @cache
    def text(cluster: str) -> str:
        values = written(tmp_path_factory.mktemp(cluster), CLUSTERS[cluster])
        return helm("template", "it", DEPLOY, "-n", "otel-ddp", "--values", values)

    return lambda cluster: parsed(text(cluster))


Rendered = Callable[[str], list[Manifest]]


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    found = {(each["kind"], each["metadata"]["name"]): each for each in manifests}
    assert len(found) == len(manifests)
    return found


def plain(*names: str) -> dict[tuple[str, str], Manifest]:
    return by_name([each for name in names for each in documents(KUBERNETES / name)])


@pytest.mark.stress
@for_each_cluster
def test_what_the_chart_makes_is_what_kubernetes_knows(cluster: str, rendered: Rendered) -> None:
    for manifest in rendered(cluster):
        for version in schemas.KUBERNETES_VERSIONS:
            schemas.check(manifest, version)


def files_of(folder: str) -> list[Path]:
    return sorted((DEPLOY / "prometheus" / folder).iterdir())


@pytest.mark.stress
def test_the_chart_makes_the_plain_manifests_and_what_their_config_maps_hold(
    rendered: Rendered,
) -> None:
    made = by_name(rendered("as-it-is"))
    pod = made["StatefulSet", "otel-ddp-gateway"]["spec"]["template"]
    # Kustomize begins a gateway anew by the name of its configuration instead.
    assert list(pod["metadata"].pop("annotations")) == ["otel-ddp.io/configuration"]
    maps = {name: made.pop((kind, name)) for kind, name in list(made) if kind == "ConfigMap"}
    daemonset = by_name(rendered("daemonset"))
    theirs = plain("agent-daemonset.yaml")
    # One variable stands at another place of the list.
    for manifests in (daemonset, theirs):
        pod = manifests["DaemonSet", "otel-ddp-agent"]["spec"]["template"]["spec"]
        pod["containers"][0]["env"].sort(key=lambda each: str(each["name"]))

    assert made == plain("gateway.yaml", "network-policy.yaml")
    assert {name: daemonset[name] for name in theirs} == theirs
    gateway = DEPLOY / "otel-collector" / "gateway.yaml"
    assert {name: each["data"] for name, each in maps.items()} == {
        "otel-ddp-gateway": {"gateway.yaml": gateway.read_text()},
        "otel-ddp-rules": {
            f"{folder}-{path.name}": path.read_text()
            for folder in ("rules", "alerts")
            for path in files_of(folder)
        },
        **{
            f"otel-ddp-dashboard-{path.stem}": {path.name: path.read_text()}
            for path in (DEPLOY / "grafana" / "dashboards").iterdir()
        },
    }
    # By these Grafana finds a board, as it does one of Kustomize's.
    (kustomization,) = documents(DEPLOY / "grafana" / "kubernetes" / "kustomization.yaml")
    for each in kustomization["configMapGenerator"][:-1]:
        found = maps[each["name"]]["metadata"]
        assert {kind: found[kind] for kind in each["options"]} == each["options"]


@pytest.mark.stress
def test_an_operator_has_the_monitors_and_rules_under_its_labels(rendered: Rendered) -> None:
    made = by_name(rendered("operator"))
    rules = {name: each for (kind, name), each in made.items() if kind == "PrometheusRule"}

    assert made.keys() >= plain("monitors.yaml").keys()
    assert {name: each["spec"] for name, each in rules.items()} == {
        f"otel-ddp-{folder}-{path.stem}": documents(path)[0]
        for folder in ("rules", "alerts")
        for path in files_of(folder)
    }
    labels = {"release": "kube-prometheus-stack"}
    assert all(each["metadata"]["labels"] == labels for each in rules.values())


def pod_of(manifests: list[Manifest], kind: str) -> Manifest:
    (found,) = (each for each in manifests if each["kind"] == kind)
    spec: Manifest = found["spec"]["template"]["spec"]
    return spec


@pytest.mark.stress
def test_agents_take_a_token_only_to_a_collector_with_tls(rendered: Rendered) -> None:
    for cluster, endpoint in (
        ("daemonset", "https://otel-ddp-gateway.otel-ddp.svc:4318"),
        ("own-collector", "http://collector.monitoring.svc:4318"),
    ):
        pod = pod_of(rendered(cluster), "DaemonSet")
        env = environment(pod["containers"][0])
        secrets = [each for each in pod["volumes"] if "secret" in each]

        assert env.get("OTEL_EXPORTER_OTLP_ENDPOINT") == endpoint
        tls = cluster == "daemonset"
        assert bool(secrets) is ("GATEWAY_TOKEN" in env) is tls
        assert ("OTEL_EXPORTER_OTLP_HEADERS" in env) is tls
    assert "StatefulSet" not in [each["kind"] for each in rendered("own-collector")]


@pytest.mark.stress
def test_a_wrong_value_is_refused_by_its_name(tmp_path: Path) -> None:
    values = written(tmp_path, {"collector": {"enabled": False}, "agent": DAEMONSET})

    status, said = go_modules.run(HELM, "template", "it", DEPLOY, "--values", values)

    assert status != 0
    assert "Nothing takes what the agents measure: set agent.endpoint" in said


def test_the_guide_installs_the_chart_with_values_that_it_has() -> None:
    commands = re.findall(r"helm .*?(?<!\\)\n", GUIDE.read_text(), re.S)
    named = re.findall(r"--set ([\w.]+)=", "".join(commands))

    assert commands
    for name in named:
        part, value, *_ = name.split(".")
        assert value in VALUES[part], name
