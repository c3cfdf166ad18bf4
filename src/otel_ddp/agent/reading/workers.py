"""Tells a worker that its parent has ended after its work from a process that died of something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from otel_ddp import catalog
from otel_ddp.journal.reader import JournalReader

_OTHER = catalog.PHASES["other"]


class End(NamedTuple):
    """What is known of the end of a process that said nothing of it; all of it may be unknown."""

    cause: Mapping[str, Any] = {}
    """What the kernel tells: `signal` or `exit_code`, `out_of_memory`."""
    parent_lives: bool | None = None
    parent_was_killed: bool = False
    """By a signal: then it cannot have meant to end anything."""
    others_live: bool = False
    """Another child of that parent is still at work."""
    others_failed: bool = False
    """Another child failed before, or the parent itself afterwards."""


NOTHING_KNOWN = End()


def parent(reader: JournalReader) -> int | None:
    """The process that started this one by multiprocessing, as that one sees it; None: none did."""
    found = reader.facts.get("parent")
    return found if isinstance(found, int) else None


def in_pool(reader: JournalReader) -> bool:
    """Whether this is a worker of a pool, which does one task after the other."""
    return reader.facts.get("pool") is True


def is_proxy(reader: JournalReader) -> bool:
    """Whether another process logs for this rank: its journal ends with that process."""
    return reader.facts.get("proxy") is True


def made_steps(reader: JournalReader) -> bool:
    """Whether the hooks in this process have counted a step of training."""
    return any(
        each.values[0] for each in reader.totals() if each.metric == catalog.TRAINING_STEPS.name
    )


def is_idle(reader: JournalReader) -> bool:
    """Whether this is a child of multiprocessing with no step and no phase under way.

    A pool ends its workers by SIGTERM while they wait for a task, and so does a parent that has no
    more work for a child. A handler of ours that told it apart would keep a rank from dying that
    hangs in native code.
    """
    progress = reader.progress()
    if parent(reader) is None or progress is None:
        return False
    if progress.phase_code != _OTHER or progress.phase_name:
        return False
    # A pool's worker may have trained in a task; elsewhere it is ranks that train.
    return in_pool(reader) or not made_steps(reader)


def was_ended(reader: JournalReader, end: End = NOTHING_KNOWN) -> bool:
    """Whether its parent has ended this process, which went without a word, after its work."""
    if is_proxy(reader):
        return True
    if not is_idle(reader) or end.parent_was_killed or "out_of_memory" in end.cause:
        return False
    if "exit_code" in end.cause:
        return bool(end.cause["exit_code"] == 0)
    if end.cause.get("signal", "SIGTERM") != "SIGTERM":
        return False
    known = "signal" in end.cause
    if in_pool(reader):
        # A pool ends all of its workers at once; one that crashes goes alone.
        return known or not end.others_live
    # Nothing tells a child that crashed from one that was ended, but that its parent ended as well;
    # and of the ranks of a run the first may have crashed.
    alone = (reader.identity.get("world_size") or 1) == 1 and end.parent_lives is False
    return (known or alone) and not end.others_failed
