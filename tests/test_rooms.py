"""The import rules of the house, read from the source rather than from memory."""

from __future__ import annotations

import ast
import graphlib
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "otel_ddp"

# For each floor: a room, and the rooms of that floor that it may import. A room is a module or a
# package. What is not here is not allowed. Within a room, files may import each other one way.
KNOWS = {
    "": {
        "vocabulary": "",
        "errors": "",
        "files": "",
        "plain": "",
        "shown": "",
        "identity": "journal",
        "journal": "",
        "settings": "identity journal",
        "diagnosis": "",
        "history": "journal",
        "recording": "journal settings",
        "torch": "identity journal recording",
        "run": "history identity journal recording settings torch",
        "agent": "__init__ diagnosis history identity journal settings",
        "cli": "__init__ agent diagnosis history identity integrations journal settings torch",
        "integrations": "__init__ identity recording run torch",
        "__init__": "identity run",
        "__main__": "cli",
    },
    "agent": {
        "__init__": "",
        "kept_thread": "",
        "ledger": "",
        "reading": "ledger",
        "node": "kept_thread ledger reading",
        "judge": "ledger node reading",
        "artifacts": "reading",
        "history": "kept_thread ledger reading",
        "export": "kept_thread ledger",
        "serve": "kept_thread ledger",
        "link": "history kept_thread reading judge",
        "notify": "export kept_thread reading judge",
        "node_watch": "artifacts history kept_thread ledger link node reading judge",
        "front": "export kept_thread node_watch notify serve judge",
        "service": "export front node_watch notify",
    },
}
# What each room may import besides.
EVERYBODYS = {"vocabulary", "errors", "files", "plain", "shown"}
# A third-party package, and the only places that may name it.
HOMES = {
    "torch": "torch/ recording/device_scalars.py cli/demo_training.py",
    "pynvml": "agent/node/nvml.py",
    "opentelemetry": "agent/export/otlp/",
    "grpc": "agent/export/otlp/",
    "cryptography": "agent/link/credentials.py",
    "google": "agent/history/ agent/link/ agent/export/otlp/",
    "prometheus_client": "agent/serve/",
    "apprise": "agent/notify/outbox.py",
    "fsspec": "agent/artifacts.py",
    "transformers": "integrations/transformers.py",
    "lightning": "integrations/lightning.py",
    "mcp": "cli/mcp.py",
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imported(path: Path) -> set[str]:
    """Every module or name that a file imports, absolute, however deep; also for typing."""
    names: set[str] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def module(path: Path) -> str:
    """The dotted name of a file within the package."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


# But for what protoc has made.
FILES = sorted(path for path in PACKAGE.rglob("*.py") if not path.stem.endswith("_pb2"))
MODULES = {module(path) for path in FILES}


def room(name: str, floor: str) -> str | None:
    """The room of a floor in which a module is; None: it is on another floor."""
    if name == "__init__":
        return "__init__" if not floor else None
    parts, above = name.split("."), floor.split(".") if floor else []
    if parts[: len(above)] != above:
        return None
    return parts[len(above)] if len(parts) > len(above) else "__init__"


def imported_modules(path: Path) -> set[str]:
    """The modules of the package that a file imports."""
    found = set()
    for name in imported(path):
        first, _, rest = name.partition(".")
        if first == "otel_ddp":
            # The last part may be something within a module.
            within = rest if rest in MODULES else rest.rpartition(".")[0]
            found.add(within or "__init__")
    return found


@pytest.mark.parametrize("floor", KNOWS)
def test_each_room_knows_only_its_neighbours(floor: str) -> None:
    for path in FILES:
        here = room(module(path), floor)
        if here is None:
            continue
        theirs = {room(each, floor) for each in imported_modules(path)} - {None, here}
        allowed = {*KNOWS[floor][here].split(), *(EVERYBODYS if not floor else ())}
        assert theirs <= allowed, f"{path} may not import {sorted(theirs - allowed)}"


@pytest.mark.parametrize("floor", KNOWS)
def test_every_room_has_its_rules(floor: str) -> None:
    assert {room(each, floor) for each in MODULES} - {None} == set(KNOWS[floor])


def test_imports_go_one_way() -> None:
    graph = {module(path): imported_modules(path) - {module(path)} for path in FILES}

    # Raises where a file leads back to itself.
    graphlib.TopologicalSorter(graph).prepare()


def test_third_party_packages_stay_where_they_live() -> None:
    for path in FILES:
        where = str(path.relative_to(PACKAGE))
        for name in imported(path):
            for package, homes in HOMES.items():
                if f"{name}.".startswith(f"{package}."):
                    assert where.startswith(tuple(homes.split())), f"{package} lives in {homes}"


def test_every_file_says_its_job_in_its_first_line() -> None:
    for path in FILES:
        first = path.read_text().splitlines()[0]
        assert first.startswith('"""'), path
        assert first.rstrip('"').endswith((".", "?")), path
