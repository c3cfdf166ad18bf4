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

    images = {SERVICES["collector"]["image"], SERVICES["prometheus"]["image"]}
    images |= {each["image"] for each in containers() if "opentelemetry" in each["image"]}

    assert images == {
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


@pytest.mark.parametrize("path", [DEPLOY / "README.md", GUIDE], ids=lambda path: str(path.name))
def test_a_link_of_the_guides_leads_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())

    assert links
    missing = {
        os.path.relpath(path.parent / each, ROOT)
        for each in links
        if not (path.parent / each).exists()
    }
    assert not missing


@pytest.mark.parametrize("path", WORDS, ids=lambda path: os.path.relpath(path, ROOT))
def test_a_path_that_a_deployment_names_is_there(path: Path) -> None:
    named = re.findall(
        r"(?<![\w/.-])(?:deploy|docs|examples|tools|src)/[\w./@-]*\w", path.read_text()
    )

    assert not {each for each in named if not (ROOT / each).exists()}


@pytest.mark.parametrize("path", WORDS, ids=lambda path: os.path.relpath(path, ROOT))
def test_a_variable_that_a_deployment_sets_is_a_setting(path: Path) -> None:
    known = set(re.findall(r"`(OTEL_\w+)`", (ROOT / "docs" / "settings.md").read_text()))
    named = set(re.findall(r"\bOTEL_[A-Z_]*[A-Z]\b", path.read_text()))

    assert named <= known


def test_the_guide_is_short_and_its_queries_name_metrics_that_there_are() -> None:
    text = GUIDE.read_text()
    known = {metric.prometheus for metric in catalog.METRICS}

    queries = "\n".join(re.findall(r"```promql\n(.*?)```", text, re.S))
    named = re.findall(r"\(((?:training|otel_ddp)_\w+)\)", queries)

    assert len(text.splitlines()) < 200
    assert named
    assert set(named) <= known
