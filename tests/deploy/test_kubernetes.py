"""deploy/kubernetes: what Kubernetes knows, and what belongs together there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from deploy import schemas
from deploy.files import (
    DEPLOY,
    EXAMPLES,
    GUIDE,
    MANIFESTS,
    containers,
    documents,
    environment,
    manifests,
    pods,
)

# A label of ours, so that those of the user's pods are the user's.
SCRAPE = "otel-ddp.io/scrape"


def one(kind: str, name: str) -> dict[str, Any]:
    (found,) = (m for m in manifests() if m["kind"] == kind and m["metadata"]["name"] == name)
    return found


@pytest.mark.parametrize("version", schemas.KUBERNETES_VERSIONS)
@pytest.mark.parametrize("path", [*MANIFESTS, *EXAMPLES], ids=lambda path: str(path.name))
def test_a_manifest_is_what_kubernetes_knows(path: Path, version: str) -> None:
    for manifest in documents(path):
        schemas.check(manifest, version)


def secrets() -> dict[str, set[str]]:
    """The Secrets that the guide has its reader make, and what is in them."""
    text = GUIDE.read_text().replace("\\\n", " ")
    found = {}
    for kind, name, rest in re.findall(r"create secret (tls|generic) (\S+)(.*)", text):
        keys = set(re.findall(r"--from-\w+=([\w.]+)=", rest))
        found[name] = {"tls.crt", "tls.key"} if kind == "tls" else keys
    return found


def test_the_guide_makes_every_secret_that_is_asked_for() -> None:
    text = "\n".join(path.read_text() for path in MANIFESTS)
    assert "kind: Secret" not in text, "a token in a file of the repository is known to everybody"
    asked = {
        (ref["name"], ref["key"])
        for each in containers()
        for variable in each.get("env", ())
        if (ref := variable.get("valueFrom", {}).get("secretKeyRef"))
    }
    mounted = [
        v["secret"] for pod in pods().values() for v in pod["spec"]["volumes"] if "secret" in v
    ]
    asked |= {(s["secretName"], i["key"]) for s in mounted for i in s.get("items", ())}

    assert asked == {("otel-ddp-gateway", "token"), ("otel-ddp-gateway", "ca.crt")}
    assert all(key in secrets()[name] for name, key in asked)
    assert {each["secretName"] for each in mounted} == set(secrets())


def agents() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each container that runs an agent, and its pod."""
    return [
        (pod["spec"], each)
        for pod in pods().values()
        for each in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"])
        if each.get("args") == ["agent"]
    ]


def test_whatever_runs_an_agent_or_a_training_names_its_node_by_the_machine() -> None:
    of_ours = [
        each
        for path in (*MANIFESTS, *EXAMPLES)
        for manifest in documents(path)
        for pod in schemas.pod_templates(manifest)
        for kind in ("initContainers", "containers")
        for each in pod["template"]["spec"].get(kind, ())
        if any(name.startswith("OTEL_DDP_") for name in environment(each))
    ]
    # Helm's template takes its containers from the manifests, but for these lines.
    notes = (DEPLOY / "templates" / "NOTES.txt").read_text()
    of_ours += [
        {"env": yaml.safe_load(re.sub(r"\{\{.*?\}\}", "X", lines))}
        for lines in re.findall(r"env:\n((?: *- \{name: .*\n)+)", notes)
    ]

    for each in of_ours:
        nodes = [one["valueFrom"] for one in each["env"] if one["name"] == "OTEL_DDP_NODE"]
        assert nodes == [{"fieldRef": {"fieldPath": "spec.nodeName"}}], each
    # Of the job, its sidecar, and the DaemonSet; of the operators' examples; of the notes.
    assert len(of_ours) == 3 + 6 + 2


def test_agents_send_to_the_gateways_service_under_the_name_in_its_certificate() -> None:
    service = one("Service", "otel-ddp-gateway")
    (host,) = set(re.findall(r"DNS:(\S+\.svc)", GUIDE.read_text()))

    for spec, agent in agents():
        env = environment(agent)
        url = urlsplit(env["OTEL_EXPORTER_OTLP_ENDPOINT"])
        assert (url.scheme, url.hostname) == ("https", host)
        assert url.port == {p["name"]: p["port"] for p in service["spec"]["ports"]}["otlp-http"]
        assert env["OTEL_EXPORTER_OTLP_HEADERS"] == "authorization=Bearer%20$(GATEWAY_TOKEN)"
        assert list(env).index("GATEWAY_TOKEN") < list(env).index("OTEL_EXPORTER_OTLP_HEADERS")
        mounted = {Path(m["mountPath"]) for m in agent["volumeMounts"] if m["name"] == "gateway-ca"}
        assert mounted == {Path(env["OTEL_EXPORTER_OTLP_CERTIFICATE"]).parent}
        assert "gateway-ca" in [each["name"] for each in spec["volumes"]]
    assert f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc" == host


def test_training_and_sidecar_meet_in_memory_as_the_same_user() -> None:
    spec = pods()["ddp-example"]["spec"]
    (agent,), (training,) = spec["initContainers"], spec["containers"]
    said = environment(agent), environment(training)
    volume = next(each for each in spec["volumes"] if each["name"] == "meeting-place")
    mounts = {
        m["mountPath"]
        for c in (agent, training)
        for m in c["volumeMounts"]
        if m["name"] == volume["name"]
    }

    # Without it a Job never ends: the agent does not.
    assert agent["restartPolicy"] == "Always"
    assert said[1]["OTEL_DDP_AGENT"] == "external"
    assert said[0]["OTEL_DDP_DIR"] == said[1]["OTEL_DDP_DIR"]
    assert volume["emptyDir"]["medium"] == "Memory"
    # The volume itself is open to others: the place is a folder in it.
    assert {str(Path(said[0]["OTEL_DDP_DIR"]).parent)} == mounts
    assert "runAsUser" in spec["securityContext"]
    assert not any("runAsUser" in each["securityContext"] for each in (agent, training))


def test_pods_in_the_restricted_namespace_are_admitted_there() -> None:
    labels = one("Namespace", "otel-ddp")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    for manifest in manifests():
        if (
            manifest["metadata"].get("namespace") != "otel-ddp"
            or "template" not in manifest["spec"]
        ):
            continue
        spec = manifest["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostPID", "hostNetwork", "hostIPC"} & set(spec)
        assert not any("hostPath" in each for each in spec["volumes"])
        for each in (*spec.get("initContainers", ()), *spec["containers"]):
            assert each["securityContext"]["allowPrivilegeEscalation"] is False
            assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_prometheus_finds_the_agents_and_the_gateway_with_and_without_an_operator() -> None:
    config = documents(DEPLOY / "prometheus" / "scrape-kubernetes.yml")[0]
    labels = {name: pod["metadata"]["labels"].get(SCRAPE) for name, pod in pods().items()}
    service = one("Service", "otel-ddp-gateway")
    gateway = {"port": "telemetry", "ports": service["spec"]["ports"]}
    agent = {"port": "metrics", "ports": [port for _, each in agents() for port in each["ports"]]}

    assert labels == {
        "ddp-example": "agent",
        "otel-ddp-agent": "agent",
        "otel-ddp-gateway": "collector",
    }
    assert service["metadata"]["labels"][SCRAPE] == "collector"
    for label, monitor, job, found in (
        ("agent", "PodMonitor", config["scrape_configs"][0], agent),
        ("collector", "ServiceMonitor", config["scrape_configs"][1], gateway),
    ):
        (spec,) = (m["spec"] for m in manifests() if m["kind"] == monitor)
        (endpoint,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
        assert (spec["selector"]["matchLabels"], endpoint["port"]) == (
            {SCRAPE: label},
            found["port"],
        )
        (asked,) = job["kubernetes_sd_configs"][0]["selectors"]
        assert asked == {"role": "pod", "label": f"{SCRAPE}={label}"}
        assert found["port"] in [each.get("regex") for each in job["relabel_configs"]]
        assert found["port"] in [each["name"] for each in found["ports"]]
    # And it is this label that the guide has people give to their own pods.
    assert f"`{SCRAPE}: agent`" in GUIDE.read_text()


# -- examples: trainings of the operators, measured without a line in the script

# The label by which the operator's pods know their job.
JOB = {
    "jobset": "jobset.sigs.k8s.io/jobset-name",
    "pytorchjob": "training.kubeflow.org/job-name",
    # The trainer makes a JobSet of its name.
    "trainjob": "jobset.sigs.k8s.io/jobset-name",
    "volcano": "volcano.sh/job-name",
}
by_operator = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.stem))


@by_operator
def test_pods_of_a_job_name_the_run_alike_and_reach_the_gateway_as_the_sidecar_does(
    path: Path,
) -> None:
    pod = pods()["ddp-example"]["spec"]
    (sidecar,) = pod["initContainers"]
    wanted = {
        each["name"]: each
        for each in sidecar["env"]
        if each["name"].startswith(("OTEL_EXPORTER_OTLP_", "GATEWAY_"))
    }
    label = {"fieldRef": {"fieldPath": f"metadata.labels['{JOB[path.stem]}']"}}
    wanted["OTEL_DDP_RUN"] = {"name": "OTEL_DDP_RUN", "valueFrom": label}
    templates = [t for manifest in documents(path) for t in schemas.pod_templates(manifest)]

    assert templates
    for spec in (each["template"]["spec"] for each in templates):
        (container,) = spec["containers"]
        assert wanted.items() <= {each["name"]: each for each in container["env"]}.items()
        assert spec["volumes"] == [e for e in pod["volumes"] if e["name"] == "gateway-ca"]
        mounted = [each for each in sidecar["volumeMounts"] if each["name"] == "gateway-ca"]
        assert container["volumeMounts"] == mounted
        names = list(environment(container))
        assert names.index("GATEWAY_TOKEN") < names.index("OTEL_EXPORTER_OTLP_HEADERS")
        # An init process: a training that is process 1 would keep the agent as its child.
        assert spec["shareProcessNamespace"] is True
