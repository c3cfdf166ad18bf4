"""The import rules of the house, read from the source rather than from memory."""

from __future__ import annotations

import ast
import graphlib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "otel_ddp"

# For each floor: a room, and the rooms of that floor that it may import. A room is a module or a
# package. What is not here is not allowed.
KNOWS = {
    "": {
        "words": "",
        "catalog": "",
        "errors": "",
        "identity": "errors journal",
        "journal": "catalog errors",
        "settings": "errors identity journal",
        "diagnosis": "catalog",
        "history": "catalog errors journal",
        "recording": "catalog errors journal settings",
        "torch": "catalog errors identity journal recording",
        "run": "catalog errors history identity journal recording settings torch",
        "agent": "__init__ catalog diagnosis errors history identity journal settings",
        "cli": (
            "__init__ agent catalog diagnosis errors history identity integrations journal "
            "settings torch"
        ),
        "integrations": "__init__ errors identity recording run torch",
        "__init__": "errors identity run",
        "__main__": "cli",
    },
    "agent": {
        "__init__": "",
        "kept_thread": "",
        "ledger": "",
        "reading": "ledger",
        "node": "kept_thread ledger reading",
        "verdicts": "ledger node reading",
        "artifacts": "kept_thread ledger reading",
        "history": "kept_thread ledger reading",
        "export": "kept_thread ledger node",
        "scrape": "kept_thread ledger node",
        "startup": "",
        "wakeup": "",
        "service": (
            "artifacts export history kept_thread ledger node reading scrape startup verdicts "
            "wakeup"
        ),
    },
    "history": {
        "__init__": "",
        "schema": "",
        "sums": "schema",
        "directory": "schema",
        "run_file": "directory schema sums",
        "reader": "directory run_file schema",
        "group_steps": "reader",
        "whole_run": "reader",
        "find_run": "directory reader whole_run",
        "quantities": "",
        "report_file": "",
        "postmortems": "",
        "profiles": "",
        "card": "quantities",
        "report": (
            "card compare group_steps postmortems profiles quantities reader report_file whole_run"
        ),
        "compare": "find_run group_steps quantities reader report_file whole_run",
        "page": "directory postmortems profiles reader schema",
    },
    "history.report": {
        "__init__": "",
        "style": "",
        "svg": "",
        "facts": "",
        "run_card": "",
        "page": "run_card style svg",
    },
    "diagnosis": {
        "__init__": "",
        "medians": "",
        "step_facts": "",
        "verdict": "",
        "waits": "medians",
        "alignment": "medians step_facts verdict",
        "device_steps": "step_facts",
        "device_waits": "arrivals step_facts verdict waits",
        "death": "verdict",
        "core_evidence": "verdict wording",
        "gpu_evidence": "verdict",
        "wording": "verdict",
        "arrivals": "step_facts verdict waits",
        "bounds": "alignment launch_need medians step_facts verdict wording",
        "memory_creep": "medians verdict wording",
        "launch_need": "medians step_facts",
        "nonfinite": "verdict wording",
        "past": "verdict wording",
        "regression": "medians step_facts verdict wording",
        "stall": "verdict wording",
        "straggler": "alignment launch_need medians regression step_facts verdict wording",
    },
    "agent.verdicts": {
        "__init__": "",
        "stack_question": "",
        "kernel_log": "",
        "pidfd": "",
        "bounded_reads": "",
        "nonfinite_values": "",
        "postmortem_files": "",
        "postmortem_text": "",
        "silent_ranks": "",
        "arrivals_answer": "",
        "arrivals_question": "arrivals_answer stack_question",
        "stack_survey": "stack_question",
        "process_memory": "bounded_reads",
        "postmortem": "postmortem_files postmortem_text",
        "exit_causes": "bounded_reads kernel_log pidfd process_memory",
        "process_case": "nonfinite_values postmortem stack_question",
        "exits": "exit_causes",
        "ended_by_parent": "exit_causes pidfd",
        "run_case": "arrivals_question exit_causes exits process_case",
        "reports": "postmortem process_case run_case",
        "verdict_series": "run_case",
        "judge": "exit_causes process_case reports run_case verdict_series",
    },
    "agent.history": {
        "__init__": "",
        "node_samples": "",
        "kept_run": "node_samples",
        "histories": "kept_run node_samples",
        "collect": "histories kept_run node_samples",
    },
    "identity": {
        "__init__": "",
        "boards": "",
        "git_commit": "",
        "launchers": "",
        "page_address": "",
        "pool_tasks": "launchers",
        "readable_names": "",
        "run_names": "launchers readable_names",
        "identity": "launchers run_names",
        "strategy": "identity",
    },
    "recording": {
        "__init__": "",
        "agent_start": "",
        "device_scalars": "",
        "secrets": "",
        "values": "secrets",
        "locked_journal": "secrets values",
        "quick_log": "",
        "recorder": "device_scalars locked_journal quick_log values",
        "step_totals": "locked_journal",
        "time_account": "locked_journal",
        "trace_context": "",
        "progress": "recorder step_totals thread_end time_account",
        "thread_end": "",
        "early_stop": "",
        "spans": "recorder trace_context values",
        "log_records": "secrets values",
        "program_loggers": "",
        "log_handler": "log_records program_loggers recorder",
        "artifacts": "recorder secrets spans values",
    },
    "run": {
        "__init__": "",
        "announcements": "",
        "current_run": "",
        "stderr": "",
        "end_card": "stderr",
        "ending": "",
        "opening": "",
        "rank_handles": "",
        "where_to_look": "stderr",
        "log_lines": "",
        "statements": "announcements log_lines",
        "run": (
            "announcements current_run end_card ending log_lines opening rank_handles "
            "statements where_to_look"
        ),
        "api": "current_run opening run",
        "trials": "api current_run run",
        "unasked": "api current_run run",
    },
    "torch": {
        "__init__": "",
        "device_clock": "",
        "frames": "",
        "inspect_values": "",
        "process_group": "",
        "collectives": "process_group",
        "open_annotations": "",
        "profile_window": "open_annotations steps",
        "stack_answers": "collectives",
        "versions": "",
        "wrappers": "",
        "steps": "frames inspect_values",
        "data_sets": "steps",
        "tensor_summary": "",
        "hooks": "data_sets frames inspect_values steps wrappers",
        "readings": "collectives device_clock frames hooks inspect_values process_group steps",
        "discovery": "frames hooks steps wrappers",
        "training_begins": "discovery hooks versions",
        "attach": "discovery hooks profile_window readings stack_answers steps training_begins",
        "measure": "attach versions wrappers",
    },
    "integrations": {
        "__init__": "",
        "arguments": "",
        "open_phase": "",
        "ray": "",
        "transformers": "arguments open_phase",
        "lightning": "arguments open_phase",
        "accelerate": "arguments",
        "ignite": "arguments open_phase",
        "launch": "lightning ray transformers",
    },
    "history.page": {
        "__init__": "",
        "app": "events exchange guard head profiles runs static_files steps values",
        "events": "exchange",
        "exchange": "",
        "guard": "exchange",
        "head": "runs",
        "profiles": "exchange",
        "runs": "exchange",
        "static_files": "exchange",
        "steps": "exchange",
        "values": "exchange",
    },
    "history.compare": {
        "__init__": "",
        "blocks": "",
        "comparison": "blocks row side step_rows value_rows",
        "limits": "comparison row",
        "pace": "blocks",
        "render": "comparison limits row side",
        "row": "blocks pace",
        "side": "",
        "sources": "side",
        "step_rows": "blocks pace row side",
        "value_rows": "blocks row side",
    },
}
# A third-party package, and the only places that may name it.
HOMES = {
    "torch": "torch/ recording/device_scalars.py cli/demo/",
    "pynvml": "agent/node/gpu/nvml/driver.py",
    "opentelemetry": "agent/export/otlp/ integrations/launch/instrumentor.py",
    "grpc": "agent/export/otlp/",
    "requests": "agent/export/otlp/",
    "prometheus_client": "agent/scrape/",
    "textual": "cli/top/app.py",
    "rich": "cli/top/app.py",
    "fsspec": "agent/artifacts/store.py",
    "transformers": "integrations/transformers.py",
    "lightning": "integrations/lightning.py",
    "accelerate": "integrations/accelerate.py",
    "ignite": "integrations/ignite.py",
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


def module(path: Path) -> str:
    """The dotted name of a file within the package."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


FILES = sorted(PACKAGE.rglob("*.py"))
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
        # Words are everybody's: they import nothing.
        allowed = {*KNOWS[floor][here].split(), *({"words"} if not floor else ())}
        assert theirs <= allowed, f"{path} may not import {sorted(theirs - allowed)}"


@pytest.mark.parametrize("floor", KNOWS)
def test_every_room_has_its_rules(floor: str) -> None:
    assert {room(each, floor) for each in MODULES} - {None} == set(KNOWS[floor])


@pytest.mark.parametrize("floor", KNOWS)
def test_imports_go_one_way(floor: str) -> None:
    graph = {here: set(theirs.split()) for here, theirs in KNOWS[floor].items()}

    # Raises where a room leads back to itself.
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("floor", ["", "agent"])
def test_a_floor_has_at_most_a_dozen_rooms(floor: str) -> None:
    # Nothing knows the integrations: they are users of the package.
    assert len(KNOWS[floor].keys() - {"__init__", "__main__", "integrations", "words"}) <= 12


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
