"""Finds ranks of this node that record nothing, and ranks of a run that export differently."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from otel_ddp import errors
from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.vocabulary.words import STATES

# A rank has trained or logged for so long: by then every rank that will call us has done so.
_PATIENCE_NS = 60 * 10**9
# A launch that began this long before the agent may have had ranks whose journals were deleted.
_BEFORE_NS = 30 * 10**9


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
    def poll(self, journals: Iterable[JournalFeed], now_ns: int) -> None:
        """Check all launches; each finding goes to the log once."""
        by_launch: dict[str, list[JournalFeed]] = {}
        for journal in journals:
            if journal.labels and (launched_by := str(journal.identity.get("launched_by") or "")):
                by_launch.setdefault(launched_by, []).append(journal)
        # A launch without journals is over.
        self._launches = {key: self._launches.get(key, _Launch()) for key in by_launch}
        notes = []
        for key, ranks in by_launch.items():
            launch = self._launches[key]
            launch.local_ranks |= {each.identity.get("local_rank") for each in ranks}
            launch.began_ns = min(launch.began_ns, *(each.reader.created_ns for each in ranks))
            living = [
                each for each in ranks if each.ended_at is None and each.identity.get("settled")
            ]
            if launch.began_ns > self._started_ns - _BEFORE_NS:
                notes += _silent(launch, living, now_ns)
            notes += _differing(living)
        for note in notes:
            errors.warn_once(
                f"{note['run']}: {note['sentence']}", "run %s: %s", note["run"], note["sentence"]
            )
        self._notes = notes


def _silent(launch: _Launch, living: list[JournalFeed], now_ns: int) -> list[dict[str, str]]:
    reported = [each.identity.get("local_world_size") for each in living]
    sizes = [size for size in reported if isinstance(size, int)]
    trained = [each for each in living if _has_run_for_long(each, now_ns)]
    # If a rank does not know its number, or how many ranks there are, none can be called missing.
    if not trained or None in launch.local_ranks or len(sizes) < len(reported):
        return []
    missing = sorted(set(range(max(sizes))) - launch.local_ranks)
    if not missing:
        return []
    several = len(missing) > 1
    first = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return [
        _note(
            trained[0],
            f"local rank{'s' * several} {first} of node {_label(trained[0], 'node')} "
            f"record{'s' * (not several)} nothing: call instrument on every rank, not on rank 0 "
            "alone; strategy='main' exports rank 0 alone",
        )
    ]


def _has_run_for_long(journal: JournalFeed, now_ns: int) -> bool:
    progress = journal.reader.progress()
    return (
        journal.state == STATES["running"]
        and progress is not None
        and now_ns - progress.state_since_ns >= _PATIENCE_NS
    )


def _differing(living: list[JournalFeed]) -> list[dict[str, str]]:
    by_run: dict[tuple[str, str], dict[str, JournalFeed]] = {}
    for journal in sorted(living, key=lambda each: each.identity.get("global_rank") or 0):
        strategy = str(journal.identity.get("strategy"))
        run = _label(journal, "group"), _label(journal, "run")
        by_run.setdefault(run, {}).setdefault(strategy, journal)
    notes = []
    for by_strategy in by_run.values():
        if len(by_strategy) > 1:
            named = ", ".join(
                f"rank {_label(each, 'rank')} {strategy!r}"
                for strategy, each in by_strategy.items()
            )
            sentence = (
                f"ranks of one launch have different strategies ({named}): set the same one on "
                "every rank, in the call or in OTEL_DDP_STRATEGY"
            )
            notes.append(_note(next(iter(by_strategy.values())), sentence))
    return notes


def _note(journal: JournalFeed, sentence: str) -> dict[str, str]:
    return {
        "run": _label(journal, "run"),
        "group": _label(journal, "group"),
        "sentence": sentence,
    }


def _label(journal: JournalFeed, name: str) -> str:
    return dict(journal.labels)[name]
