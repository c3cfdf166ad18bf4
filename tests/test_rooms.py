"""The import rules of the house, read from the source rather than from memory."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "otel_ddp"

# A room, and the rooms that it may import. What is not here is not allowed.
KNOWS = {
    "errors": "",
    "catalog": "",
    "containment": "",
    "settings": "errors run_names",
    "system": "",
    "launchers": "errors",
    "pools": "launchers",
    "run_names": "launchers",
    "identity": "errors launchers run_names",
    "journal": "errors",
    "values": "containment",
    "strategies": "errors identity",
    "revision": "",
    "versions": "",
    "guarded_journal": "catalog containment journal settings values",
    "recorder": "catalog containment guarded_journal journal settings torch values",
    "progress": "catalog guarded_journal journal recorder",
    "spans": "journal recorder values",
    "agent_link": "agent_terms containment journal",
    "run": "agent_link agent_terms catalog containment errors identity journal launchers pools "
    "progress recorder revision run_names session settings spans strategies system torch versions "
    "values",
    "session": "containment pools run strategies",
    "instrumentation": "run session strategies torch",
    "torch": "catalog containment identity journal progress",
    "survey": "catalog journal workers",
    "workers": "catalog journal",
    "agent_terms": "",
    "diagnosis": "catalog",
    "agent": "agent_terms catalog containment diagnosis errors journal settings survey workers "
    "__init__",
    "cli": "agent catalog demo diagnosis errors identity journal settings strategies survey "
    "system versions __init__",
    "demo": "__init__",
    "__init__": "errors identity instrumentation run session",
    "__main__": "cli",
}
# A third-party package, and the only places that may name it.
HOMES = {
    "torch": "torch/ demo/",
    "pynvml": "agent/sources/nvml/driver.py",
    "opentelemetry": "agent/otlp/",
    "grpc": "agent/otlp/",
    "requests": "agent/otlp/",
    "prometheus_client": "agent/endpoint.py agent/exposition.py",
}


def imported(path: Path) -> set[str]:
    """Every module or name that a file imports, absolute, however deep; typing-only aside."""
    tree = ast.parse(path.read_text())
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    typing_only = {child for block in blocks for child in ast.walk(block)}
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_room_knows_only_its_neighbours(path: Path) -> None:
    here = room(path)
    where = str(path.relative_to(PACKAGE))
    rooms = {room(each) for each in FILES}

    for name in imported(path):
        if name.split(".")[0] == "otel_ddp":
            parts = name.split(".")
            there = parts[1] if len(parts) > 1 and parts[1] in rooms else "__init__"
            assert there in {here, *KNOWS[here].split()}, f"{here} may not import {there}"
        for package, homes in HOMES.items():
            if f"{name}.".startswith(f"{package}."):
                assert where.startswith(tuple(homes.split())), f"{package} lives in {homes}"


def test_every_room_has_its_rules() -> None:
    assert {room(path) for path in FILES} == set(KNOWS)


def test_every_file_says_its_job_in_its_first_line() -> None:
    for path in FILES:
        first = path.read_text().splitlines()[0]
        assert first.startswith('"""'), path
        assert first.rstrip('"').endswith((".", "?")), path
