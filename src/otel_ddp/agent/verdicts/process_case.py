"""What the judge keeps of one process: where it is, its stack question, its logged values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.verdicts import postmortem
from otel_ddp.agent.verdicts.nonfinite_values import NonfiniteValues
from otel_ddp.agent.verdicts.stack_question import StackQuestion
from otel_ddp.diagnosis.stall.evidence import Position
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.words import phase_word, state_word

Snapshot = tuple[dict[str, Any], list[dict[str, Any]]]
"""What a post-mortem shows of a process: its description and its last values."""


class ProcessCase:
    """One process, from when its labels are known until its journal is closed."""

    def __init__(self, journal: JournalFeed) -> None:
        reader = journal.reader
        self.journal = journal
        self.labels: Labels = journal.labels
        self.question = StackQuestion(reader.path, journal.pid, reader.start_ticks)
        self.values = NonfiniteValues(reader)
        self.end_is_known = False
        self.memory_at = 0

    @property
    def is_at_work(self) -> bool:
        """Whether the process has not ended."""
        return self.journal.ended_at is None

    @property
    def process(self) -> tuple[int, int]:
        """Its process id and start."""
        return self.journal.pid, self.journal.reader.start_ticks

    def position(self, origin_ns: int) -> Position | None:
        """Where it is in its training; *origin_ns*: when the monotonic clock was 0."""
        reader = self.journal.reader
        progress = reader.progress()
        if progress is None:
            return None
        phase = phase_word(progress.phase_code)
        name = reader.names.get(progress.phase_name) if phase == "other" else None
        return Position(
            labels=self.labels,
            alive=self.is_at_work,
            state=state_word(self.journal.state),
            step=self.journal.step(),
            phase=phase,
            in_mark=reader.in_mark(),
            waits_in=_waits_in(reader.facts),
            # On the host's monotonic clock, which the process and the agent share.
            since_ns=origin_ns + reader.created_monotonic_ns + progress.phase_after_ns,
            name="" if name is None else name.text,
            expect_s=progress.expect_ms / 1000 if progress.expect_ms else None,
            written=reader.position,
            world=self.journal.world_size,
        )


def _waits_in(facts: Mapping[str, Any]) -> frozenset[str] | None:
    """The phases of work in which a process may wait for other ranks, as far as it has told."""
    capability, own = facts.get("capability"), facts.get("own_collectives", ())
    if not isinstance(capability, dict) or capability.get("comm_wait") != "":
        return None
    return frozenset(map(str, own)) if isinstance(own, list | tuple) else None


def snapshot(journal: JournalFeed) -> Snapshot:
    """What a post-mortem shows of this process, as it is now."""
    described = journal.describe()
    values = postmortem.last_values(journal.reader, described.rank, described.node)
    return described.to_json(), values
