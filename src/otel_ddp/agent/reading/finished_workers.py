"""What a journal shows of a worker that ended without a report: had it finished its work?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from otel_ddp.journal.process_state import made_steps
from otel_ddp.journal.reader import JournalReader
from otel_ddp.vocabulary.words import PHASES

_OTHER = PHASES["other"]


class End(NamedTuple):
    """What is known of the end of a process that recorded no end; all of it may be unknown."""

    cause: Mapping[str, Any] = {}
    """From the kernel: `signal` or `exit_code`, `out_of_memory`."""
    parent_lives: bool | None = None
    parent_was_killed: bool = False
    """A signal killed the parent: then it did not end its workers on purpose."""
    others_live: bool = False
    """Another child of that parent is still at work."""
    others_failed: bool = False
    """Another child failed before, or the parent afterwards."""


NOTHING_KNOWN = End()


def parent(reader: JournalReader) -> int | None:
    """The process that started this one by multiprocessing, as this one sees it; None: none did."""
    found = reader.facts.get("parent")
    return found if isinstance(found, int) else None


def in_pool(reader: JournalReader) -> bool:
    """Whether this is a worker of a pool, which does one task after another."""
    return reader.facts.get("pool") is True


def has_returned(reader: JournalReader) -> bool:
    """Whether the thread that trained has ended between two steps: its process is a container.

    Ray's workers leave with 1, or are killed, once the function that trains has returned.
    """
    return reader.facts.get("returned") is True and _between_phases(reader)


def _between_phases(reader: JournalReader) -> bool:
    progress = reader.progress()
    return progress is not None and progress.phase_code == _OTHER and not progress.phase_name


def is_idle(reader: JournalReader) -> bool:
    """Whether this is a child of multiprocessing with no step and no phase under way.

    A pool ends its workers by SIGTERM while they wait for a task; so does a parent that has no
    more work for a child. We do not handle that signal to recognize it: a rank that hangs in
    native code would then not die of it.
    """
    if parent(reader) is None or not _between_phases(reader):
        return False
    # A pool's worker may have trained in a task; outside of pools a child that trained is a rank.
    return in_pool(reader) or not made_steps(reader)


def ended_by_parent(reader: JournalReader, end: End = NOTHING_KNOWN) -> bool:
    """Whether this process, which recorded no end, was ended after its work."""
    if has_returned(reader):
        signal = end.cause.get("signal", "SIGKILL")
        return "out_of_memory" not in end.cause and signal in ("SIGKILL", "SIGTERM")
    if not is_idle(reader) or end.parent_was_killed or "out_of_memory" in end.cause:
        return False
    if "exit_code" in end.cause:
        return bool(end.cause["exit_code"] == 0)
    if end.cause.get("signal", "SIGTERM") != "SIGTERM":
        return False
    known = "signal" in end.cause
    if in_pool(reader):
        # A pool ends all of its workers at once; a worker that crashes ends alone.
        return known or not end.others_live
    # Without the kernel's answer, only the end of its parent shows that a child did not crash. And
    # that shows nothing for ranks of one run: the first of them may have crashed.
    alone = (reader.identity.get("world_size") or 1) == 1 and end.parent_lives is False
    return (known or alone) and not end.others_failed
