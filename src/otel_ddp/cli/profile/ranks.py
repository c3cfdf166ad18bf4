"""Finds the ranks to profile: the suspect, and a healthy one beside it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp.agent.reading.node_status import survey
from otel_ddp.agent.reading.recent_steps import RecentSteps
from otel_ddp.cli.text import cell, mappings
from otel_ddp.diagnosis.medians import lower_median
from otel_ddp.journal.layout import ASK_SUFFIX
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import JournalReader, Unreadable


class NotFound(Exception):
    """There is nothing to profile; the text says why, and what to do."""


class Candidate(NamedTuple):
    """A living rank."""

    journal: Path
    rank: int
    group: str
    run: str
    pid: int
    user: int
    """Its user, as the owner of its journal."""
    work_ns: float | None
    """Its own time in a step; None where it has not ended any step."""

    @property
    def label(self) -> str:
        return f"rank {self.rank}"


class Chosen(NamedTuple):
    """What is profiled, the suspect first."""

    ranks: tuple[Candidate, ...]
    why: str
    """Why these."""


def choose(places: Sequence[Place], ranks: Sequence[int], run: str) -> Chosen:
    """The ranks of one run; raises NotFound."""
    found = [each for place in places for each in _candidates(place) if run in ("", each.run)]
    if not found:
        which = f"no rank of the run {run!r}" if run else "no rank"
        raise NotFound(f"{which} runs on this node.")
    if ranks:
        suspects = _named(found, ranks)
        why = "named"
    else:
        suspects = [_suspect(found, mappings(survey(list(places))["verdicts"]))]
        why = f"{suspects[0].label} is named by a verdict"
    if len(suspects) == 1:
        first = suspects[0]
        others = [each for each in _of_run(found, first) if each.rank != first.rank]
        if others:
            healthy = _median(others)
            return Chosen((first, healthy), f"{why}; {healthy.label} is the median of the others")
    return Chosen(tuple(suspects), why)


def _candidates(place: Place) -> Iterable[Candidate]:
    for path in place.journals():
        try:
            reader = JournalReader(path)
        except Unreadable:
            continue
        try:
            rank = reader.identity.get("global_rank")
            if isinstance(rank, int) and reader.writer_is_alive():
                recent = RecentSteps(reader)
                recent.poll()
                if not recent.steps and not path.with_suffix(ASK_SUFFIX).exists():
                    continue  # an evaluator, or a process that only logs
                yield Candidate(
                    *(path, rank, str(reader.identity.get("group") or "")),
                    *(str(reader.identity.get("run") or ""), reader.pid, os.stat(path).st_uid),
                    recent.work_ns(),
                )
        except OSError:
            continue  # deleted at this moment
        finally:
            reader.close()


def _named(found: Sequence[Candidate], ranks: Sequence[int]) -> list[Candidate]:
    runs = {(each.group, each.run) for each in found if each.rank in ranks}
    if len(runs) > 1:
        names = ", ".join(sorted(cell(run) for _, run in runs))
        raise NotFound(f"Several runs here have such a rank: {names}. Choose one by --run.")
    suspects = []
    for rank in dict.fromkeys(ranks):
        # Of a rank that was started again, the newest process.
        same = [each for each in found if each.rank == rank]
        if not same:
            here = ", ".join(str(each) for each in sorted({each.rank for each in found}))
            raise NotFound(f"Rank {rank} does not run on this node; here are: {here}.")
        suspects.append(same[-1])
    return suspects


def _suspect(found: Sequence[Candidate], verdicts: Iterable[Mapping[str, Any]]) -> Candidate:
    for verdict in verdicts:
        who = verdict.get("who")
        if not isinstance(who, Mapping):
            continue
        for each in found:
            labels = (cell(who.get("group")), cell(who.get("run")), cell(who.get("rank")))
            if labels == (each.group, each.run, str(each.rank)):
                return each
    raise NotFound("No open verdict names a rank of this node: say which one by --rank.")


def _of_run(found: Iterable[Candidate], first: Candidate) -> list[Candidate]:
    return [each for each in found if (each.group, each.run) == (first.group, first.run)]


def _median(others: Sequence[Candidate]) -> Candidate:
    """The rank whose own time is in the middle."""
    works = [each.work_ns for each in others if each.work_ns is not None]
    if not works:
        return others[0]
    middle = lower_median(works)
    return next(each for each in others if each.work_ns == middle)
