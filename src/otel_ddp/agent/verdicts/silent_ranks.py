"""Finds ranks of this node that record nothing."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from otel_ddp import errors
from otel_ddp.agent.reading.process import Process
from otel_ddp.diagnosis.say import first_of, plural, verb
from otel_ddp.diagnosis.verdict import run_labels
from otel_ddp.vocabulary.words import STATES

# A rank has trained or logged for so long: by then every rank that will call us has done so.
_PATIENCE_NS = 60 * 10**9
# A launch that began this long before the agent may have had ranks whose journals were deleted.
_BEFORE_NS = 30 * 10**9
_MOST_NAMED = 8


@dataclass
class _Launch:
    """The ranks of one launcher on this node that have ever opened a journal."""

    local_ranks: set[Any] = field(default_factory=set)
    began_ns: int = 2**63


class SilentRanks:
    """One per node. Polled with all journals, now and then."""

    def __init__(self, started_ns: int | None = None) -> None:
        """*started_ns*: when this agent started."""
        self._started_ns = time.time_ns() if started_ns is None else started_ns
        self._launches: dict[str, _Launch] = {}
        self._notes: list[dict[str, str]] = []

    def notes(self) -> list[dict[str, str]]:
        """What was found by the last poll: a sentence each, with its run."""
        return self._notes

    @errors.contained()
    def poll(self, processes: Iterable[Process], now_ns: int) -> None:
        """Check all launches; each finding goes to the log once."""
        by_launch: dict[str, list[Process]] = {}
        for process in processes:
            if process.labels and (launched_by := str(process.identity.get("launched_by") or "")):
                by_launch.setdefault(launched_by, []).append(process)
        # A launch without journals is over.
        self._launches = {key: self._launches.get(key, _Launch()) for key in by_launch}
        self._notes = []
        for key, ranks in by_launch.items():
            launch = self._launches[key]
            launch.local_ranks |= {each.identity.get("local_rank") for each in ranks}
            launch.began_ns = min(launch.began_ns, *(each.reader.created_ns for each in ranks))
            living = [each for each in ranks if each.is_at_work and each.identity.get("settled")]
            if launch.began_ns > self._started_ns - _BEFORE_NS:
                self._note_silent(launch.local_ranks, living, now_ns)

    def _note_silent(self, known: set[Any], living: list[Process], now_ns: int) -> None:
        trained = [each for each in living if _has_run_for_long(each, now_ns)]
        reported = [each.identity.get("local_world_size") for each in living]
        sizes = [size for size in reported if isinstance(size, int)]
        # If a rank does not know its number, or how many ranks there are, none can be called
        # missing.
        if not trained or None in known or len(sizes) < len(reported):
            return
        if missing := [str(each) for each in range(max(sizes)) if each not in known]:
            self._note(
                trained[0],
                f"local rank{plural(missing)} {first_of(missing, _MOST_NAMED)} of node "
                f"{dict(trained[0].labels)['node']} {verb(missing, 'records', 'record')} nothing: "
                "call instrument on every rank, not on rank 0 alone; strategy='main' exports rank "
                "0 alone",
            )

    def _note(self, process: Process, sentence: str) -> None:
        of_run = dict(run_labels(process.labels))
        self._notes.append({**of_run, "sentence": sentence})
        run = of_run["run"]
        errors.warn_once(f"{run}: {sentence}", "run %s: %s", run, sentence)


def _has_run_for_long(process: Process, now_ns: int) -> bool:
    progress = process.reader.progress()
    return (
        process.life.state == STATES["running"]
        and progress is not None
        and now_ns - progress.state_since_ns >= _PATIENCE_NS
    )
