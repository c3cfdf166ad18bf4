"""What deploy/ and its guide say: paths, variables, versions and commands that there are."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from deploy.files import DEPLOY, GUIDE, ROOT, SERVICES, containers, environment, pods
from otel_ddp.vocabulary import catalog
from stack.servers import CONFIGURATIONS, binaries, validated


def test_deployments_and_tests_take_the_same_versions_of_the_servers() -> None:
    versions = (ROOT / "tools" / "stack" / "versions.py").read_text()
    collector = re.search(r'^COLLECTOR = "(.+)"', versions, re.M)
    prometheus = re.search(r'^PROMETHEUS = "(.+)"', versions, re.M)
    assert collector
    assert prometheus

    images = {each["image"] for each in (*SERVICES.values(), *containers())}

    assert all(re.search(r":v?\d+\.\d+\.\d+$", each) for each in images)
    assert {each for each in images if re.search("opentelemetry|prom/", each)} == {
        f"otel/opentelemetry-collector-contrib:{collector[1]}",
        f"prom/prometheus:v{prometheus[1]}",
    }


def test_the_real_collector_takes_its_configurations_with_what_the_deployments_set(
    tmp_path: Path,
) -> None:
    built = binaries()
    (gateway,) = pods()["otel-ddp-gateway"]["spec"]["containers"]
    deployed = {
        "all-in-one.yaml": SERVICES["collector"]["environment"],
        "gateway.yaml": environment(gateway),
    }
    # It looks whether these are there, and on this machine they are not.
    files = {"TLS_CERT_FILE": __file__, "TLS_KEY_FILE": __file__, "QUEUE_DIR": str(tmp_path / "q")}

    for name, env in deployed.items():
        assert validated(built, CONFIGURATIONS / name, **(env | files)) == (0, ""), name


WORDS = [path for path in (*DEPLOY.rglob("*"), GUIDE) if path.is_file() and path.suffix != ".json"]


@pytest.mark.parametrize("path", WORDS, ids=lambda path: os.path.relpath(path, ROOT))
def test_paths_and_variables_that_a_deployment_names_are_there(path: Path) -> None:
    text = path.read_text()
    known = set(re.findall(r"`(OTEL_\w+)`", (ROOT / "docs" / "settings.md").read_text()))

    paths = re.findall(r"(?<![\w/.-])(?:deploy|docs|examples|tools|src)/[\w./@-]*\w", text)

    assert not {each for each in paths if not (ROOT / each).exists()}
    assert set(re.findall(r"\bOTEL_[A-Z_]*[A-Z]\b", text)) <= known


def test_the_queries_of_the_guide_name_metrics_that_there_are() -> None:
    text = GUIDE.read_text()
    known = {metric.prometheus for metric in catalog.METRICS}

    queries = "\n".join(re.findall(r"```promql\n(.*?)```", text, re.S))
    named = re.findall(r"\(((?:training|otel_ddp)_\w+)\)", queries)

    assert named
    assert set(named) <= known
