"""What deploy/ and its guide say: paths, variables, versions and commands that there are."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from deploy.files import (
    DEPLOY,
    GUIDE,
    ROOT,
    SERVICES,
    containers,
    environment,
    in_use,
    pods,
    with_environment,
)
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


(GATEWAY,) = pods()["otel-ddp-gateway"]["spec"]["containers"]
OF_COMPOSE = SERVICES["collector"]
# Its own numbers; the others are in the configuration as a whole address.
TELEMETRY = 8888


class Deployed(NamedTuple):
    """What a deployment gives its collector."""

    env: dict[str, str]
    command: list[str]
    mounted: list[str]
    ports: set[int]


DEPLOYED = {
    "all-in-one.yaml": Deployed(
        OF_COMPOSE["environment"],
        OF_COMPOSE["command"],
        [each["target"] for each in OF_COMPOSE["volumes"]],
        {int(each.rpartition(":")[2]) for each in OF_COMPOSE["ports"]},
    ),
    "gateway.yaml": Deployed(
        environment(GATEWAY),
        GATEWAY["args"],
        [each["mountPath"] for each in GATEWAY["volumeMounts"]],
        {each["containerPort"] for each in GATEWAY["ports"]},
    ),
}


@pytest.mark.parametrize("name", DEPLOYED)
def test_a_deployment_sets_all_that_its_collector_reads(name: str, tmp_path: Path) -> None:
    env, command, mounted, ports = DEPLOYED[name]
    text = (CONFIGURATIONS / name).read_text()

    parts = in_use(yaml.safe_load(with_environment(text, env)))

    needed = re.findall(r"\$\{env:(\w+)\}", re.sub(r"(?m)^ *#.*$", "", text))
    assert set(needed) <= set(env)
    # Loopback would be the container itself.
    assert not [each for each, part in parts.items() if re.search("127.0.0.1|localhost", str(part))]
    protocols = parts["otlp"]["protocols"]
    tls = protocols["http"].get("tls", {})
    files = [env["QUEUE_DIR"], command[0].partition("=")[2]]
    files += [tls[each] for each in ("cert_file", "key_file") if each in tls]
    assert [each for each in files if not each.startswith(tuple(mounted))] == []
    listening = [each["endpoint"] for each in (*protocols.values(), parts["health_check"])]
    assert ports - {TELEMETRY} <= {int(each.rpartition(":")[2]) for each in listening}
    # The real one looks whether these are there, and on this machine they are not.
    here = {"TLS_CERT_FILE": __file__, "TLS_KEY_FILE": __file__, "QUEUE_DIR": str(tmp_path / "q")}
    assert validated(binaries(), CONFIGURATIONS / name, **(env | here)) == (0, "")


WORDS = [path for path in (*DEPLOY.rglob("*"), GUIDE) if path.is_file() and path.suffix != ".json"]


@pytest.mark.parametrize("path", WORDS, ids=lambda path: os.path.relpath(path, ROOT))
def test_paths_and_variables_that_a_deployment_names_are_there(path: Path) -> None:
    text = path.read_text()
    known = set(re.findall(r"`(OTEL_\w+)`", (ROOT / "docs" / "settings.md").read_text()))

    paths = re.findall(r"(?<![\w/.-])(?:deploy|docs|examples|tools|src)/[\w./@-]*\w", text)

    assert not {each for each in paths if not (ROOT / each).exists()}
    assert set(re.findall(r"\bOTEL_[A-Z_]*[A-Z]\b", text)) <= known


def test_compose_publishes_loopback_only() -> None:
    published = [port for each in SERVICES.values() for port in each.get("ports", ())]

    assert sorted(published) == [
        "127.0.0.1:3000:3000",
        "127.0.0.1:4317:4317",
        "127.0.0.1:4318:4318",
        "127.0.0.1:9090:9090",
    ]
    assert not any("network_mode" in each or each.get("privileged") for each in SERVICES.values())


def test_compose_holds_no_secret_and_grafana_lets_nobody_in() -> None:
    environment = {
        k: v for each in SERVICES.values() for k, v in each.get("environment", {}).items()
    }

    assert not [key for key in environment if re.search("PASSWORD|TOKEN|SECRET|_KEY", key)]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    # Else there is admin with the password that everybody knows.
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
