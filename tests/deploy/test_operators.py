"""deploy/kubernetes/examples: trainings of the operators, measured without a line in the script."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from deploy.files import EXAMPLES, ROOT, documents, environment, pods
from deploy.schemas import pod_templates

# The label by which the operator's pods know their job.
JOB = {
    "jobset": "jobset.sigs.k8s.io/jobset-name",
    "pytorchjob": "training.kubeflow.org/job-name",
    # The trainer makes a JobSet of its name.
    "trainjob": "jobset.sigs.k8s.io/jobset-name",
    "volcano": "volcano.sh/job-name",
}
by_operator = pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.stem))


def specs(path: Path) -> list[dict[str, Any]]:
    return [
        template["template"]["spec"]
        for manifest in documents(path)
        for template in pod_templates(manifest)
    ]


@by_operator
def test_all_pods_of_a_job_name_the_run_alike(path: Path) -> None:
    for spec in specs(path):
        (container,) = spec["containers"]
        (run,) = (each for each in container["env"] if each["name"] == "OTEL_DDP_RUN")

        label = run["valueFrom"]["fieldRef"]["fieldPath"]
        assert label == f"metadata.labels['{JOB[path.stem]}']"


@by_operator
def test_the_training_starts_under_our_command_and_is_a_file_of_the_image(path: Path) -> None:
    commands = re.findall(r"command:(.*?)\n *(?:env|---)", path.read_text(), re.S)
    words = [re.findall(r"[^\s,\[\]]+", command.replace("\n", " ")) for command in commands]

    assert words
    for command in words:
        command = [word for word in command if word != "-"]
        assert command[:4] == ["otel-ddp", "run", "--", "torchrun"]
        assert (ROOT / command[-1]).is_file()


@by_operator
def test_agents_of_the_examples_reach_the_gateway_as_the_sidecar_does(path: Path) -> None:
    sidecar = pods()["ddp-example"]["spec"]["initContainers"][0]
    wanted = {
        each["name"]: each
        for each in sidecar["env"]
        if each["name"].startswith(("OTEL_EXPORTER_OTLP_", "GATEWAY_"))
    }
    volumes = pods()["ddp-example"]["spec"]["volumes"]

    for spec in specs(path):
        (container,) = spec["containers"]
        assert wanted.items() <= {each["name"]: each for each in container["env"]}.items()
        assert spec["volumes"] == [each for each in volumes if each["name"] == "gateway-ca"]
        mounted = [each for each in sidecar["volumeMounts"] if each["name"] == "gateway-ca"]
        assert container["volumeMounts"] == mounted
        names = list(environment(container))
        assert names.index("GATEWAY_TOKEN") < names.index("OTEL_EXPORTER_OTLP_HEADERS")
        # An init process: a training that is process 1 would keep the agent as its child.
        assert spec["shareProcessNamespace"] is True
