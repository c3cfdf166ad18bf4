"""Which unrecorded ends are those of workers that their parent has ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from otel_ddp.journal import layout
from otel_ddp.journal.process_state import ended_by_parent
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.writer import JournalWriter
from otel_ddp.vocabulary.catalog import TRAINING_STEPS
from otel_ddp.vocabulary.words import PHASES, STATES

WORKER: Mapping[str, Any] = {"parent": 1234, "pool": False}
POOLED: Mapping[str, Any] = {"parent": 1234, "pool": True}
SIGTERM = {"signal": "SIGTERM", "resident_bytes": 1}
LIVES, GONE = {"parent_lives": True}, {"parent_lives": False}


def ended(
    folder: Path,
    facts: Mapping[str, Any],
    end: Mapping[str, Any],
    *,
    phase: str = "other",
    name: str = "",
    steps: int = 0,
    world: int | None = None,
) -> bool:
    """Whether a process that stood there when it went was ended by its parent."""
    writer = JournalWriter(folder, 128 * 1024, {"run": "r", "world_size": world})
    writer.document(layout.FACTS, facts)
    writer.phase(PHASES[phase], writer.name(name) if name else 0, 5)
    writer.state(STATES["running"], 6)
    if steps:
        writer.add(writer.counter(TRAINING_STEPS.name), steps)
    writer.close()
    reader = JournalReader(writer.path)
    reader.read_definitions()
    answer = ended_by_parent(reader, **end)
    reader.close()
    return answer


@pytest.mark.parametrize(
    ("facts", "end"),
    [
        # The kernel reports the signal that a parent sends.
        (WORKER, {"cause": SIGTERM, **LIVES}),
        (POOLED, {"cause": SIGTERM, **LIVES}),
        (WORKER, {"cause": {"exit_code": 0}}),
        # It reports nothing of a worker of a pool; or of another child whose parent has ended too.
        (POOLED, LIVES),
        (POOLED, {}),
        (WORKER, GONE),
    ],
)
def test_an_idle_worker_was_ended_by_its_parent(
    facts: Mapping[str, Any], end: Mapping[str, Any], tmp_path: Path
) -> None:
    assert ended(tmp_path, facts, end)


@pytest.mark.parametrize(
    ("facts", "end"),
    [
        ({}, {"cause": SIGTERM}),
        (POOLED, {"cause": {"signal": "SIGKILL"}}),
        (POOLED, {"cause": {**SIGTERM, "out_of_memory": "cgroup events"}}),
        (POOLED, {"cause": {"exit_code": 1}}),
        (WORKER, LIVES),
        (WORKER, {}),
    ],
)
def test_a_process_that_something_else_has_ended_was_killed(
    facts: Mapping[str, Any], end: Mapping[str, Any], tmp_path: Path
) -> None:
    assert not ended(tmp_path, facts, end)


@pytest.mark.parametrize("facts", [WORKER, POOLED])
def test_a_worker_with_a_phase_under_way_was_killed(
    facts: Mapping[str, Any], tmp_path: Path
) -> None:
    assert not ended(tmp_path, facts, {"cause": SIGTERM}, phase="forward")
    assert not ended(tmp_path, facts, {"cause": SIGTERM}, name="my own")


def test_of_processes_that_train_only_a_worker_of_a_pool_may_be_idle(tmp_path: Path) -> None:
    assert ended(tmp_path, POOLED, {"cause": SIGTERM}, steps=3)
    assert ended(tmp_path, POOLED, {"cause": SIGTERM}, steps=3, phase="unmeasured")
    assert not ended(tmp_path, WORKER, {"cause": SIGTERM}, steps=3)


def test_one_of_several_ranks_may_have_crashed_if_the_signal_is_unknown(
    tmp_path: Path,
) -> None:
    assert ended(tmp_path, WORKER, {"cause": SIGTERM}, world=2)
    assert not ended(tmp_path, WORKER, GONE, world=2)
    assert ended(tmp_path, WORKER, GONE, world=1)
