"""The files in deploy/, read as those read them for whom they are."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
GUIDE = ROOT / "docs" / "deploy.md"


class _Once(yaml.SafeLoader):
    """Refuses a key that is there twice: the first one would silently not count."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        assert len(keys) == len(set(keys)), f"a key twice in {node.start_mark}"
        return super().construct_mapping(node, deep)


def documents(path: Path) -> list[dict[str, Any]]:
    return parsed(path.read_text())


def parsed(text: str) -> list[dict[str, Any]]:
    return [each for each in yaml.load_all(text, Loader=_Once) if each]


def tool(name: str) -> str | None:
    """A program of this machine, or of the environment that the tests run in."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def with_environment(text: str, env: dict[str, str]) -> str:
    """A collector's configuration as it reads it."""
    return re.sub(
        r"\$\{env:(\w+)(?::-([^}]*))?\}", lambda m: env.get(m[1], m[2] if m[2] else ""), text
    )


def in_use(configuration: dict[str, Any]) -> dict[str, Any]:
    """What of a collector's configuration the pipelines and the service name."""
    service = configuration["service"]
    parts: dict[str, Any] = {"telemetry": service["telemetry"]}
    for kind in ("receivers", "processors", "exporters"):
        for pipeline in service["pipelines"].values():
            parts |= {name: configuration[kind][name] for name in pipeline[kind]}
    return parts | {name: configuration["extensions"][name] for name in service["extensions"]}


COMPOSE = documents(DEPLOY / "compose.yaml")[0]
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]

KUBERNETES = DEPLOY / "kubernetes"
MANIFESTS = sorted(set(KUBERNETES.glob("*.yaml")) - {KUBERNETES / "kustomization.yaml"})
EXAMPLES = sorted(KUBERNETES.glob("examples/*.yaml"))


def manifests() -> list[dict[str, Any]]:
    return [each for path in MANIFESTS for each in documents(path)]


def pods() -> dict[str, dict[str, Any]]:
    """The pod templates, by the name of what makes them."""
    return {
        m["metadata"]["name"]: m["spec"]["template"]
        for m in manifests()
        if "template" in m.get("spec", {})
    }


def containers() -> Iterator[dict[str, Any]]:
    for pod in pods().values():
        yield from pod["spec"].get("initContainers", ())
        yield from pod["spec"]["containers"]


def environment(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "from elsewhere") for each in container.get("env", ())}
