"""Chooses the ranks to profile: the suspect, and a healthy one beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp.cli.text import cell, named_ranks
from otel_ddp.errors import OtelDdpError
from otel_ddp.journal.layout import ASK_SUFFIX
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import survey


class NotFound(OtelDdpError):
    """There is nothing to profile; the text says why, and what to do."""


class Candidate(NamedTuple):
    """A living rank, of this node or of another one of which the agent here knows."""

    place: Place
    process: ProcessState

    @property
    def journal(self) -> Path:
        return self.place.directory / self.process.journal

    @property
    def rank(self) -> int:
        return self.process.rank or 0

    @property
    def is_here(self) -> bool:
        return self.journal.exists()

    @property
    def takes_questions(self) -> bool:
        return self.journal.with_suffix(ASK_SUFFIX).exists()


class Chosen(NamedTuple):
    """What is profiled, the suspect first."""

    ranks: tuple[Candidate, ...]
    why: str
    """Why these."""


def choose(places: Sequence[Place], ranks: Sequence[int], run: str) -> Chosen:
    """The ranks of one run; raises NotFound."""
    found: list[Candidate] = []
    verdicts: list[Mapping[str, Any]] = []
    looks: list[str] = []
    for place in places:
        here = survey([place])
        verdicts += here.verdicts
        looks += here.looks(run)
        found += [
            Candidate(place, each)
            for each in here.processes
            if not each.ended and each.rank is not None and run in ("", each.run)
        ]
    # The last one counts. Evaluators and processes that only log give way to a rank of the same
    # number that trains.
    found.sort(key=lambda each: (each.takes_questions, each.is_here))
    suspects = [who for told in verdicts for who in reversed(found) if _is_named(who, told)]
    try:
        if not found:
            which = f"no rank of the run {run!r}" if run else "no rank"
            raise NotFound(f"{which} runs on this node.")
        if ranks:
            chosen, why = _asked_for(found, ranks), "named"
        elif suspects:
            chosen, why = suspects[:1], f"rank {suspects[0].rank} is named by a verdict"
        else:
            raise NotFound("No open verdict names a rank of this node: say which one by --rank.")
        for each in chosen:
            if not each.is_here:
                where = cell(each.process.node)
                raise NotFound(f"Rank {each.rank} runs on {where}: use this command there.")
    except NotFound as what:
        raise NotFound("\n".join((str(what), *map(cell, looks)))) from None
    if len(chosen) == 1:
        of_run, rank = chosen[0].process.of_run, chosen[0].rank
        others = [
            each
            for each in found
            if each.takes_questions and each.process.of_run == of_run and each.rank != rank
        ]
        # One that is late as well would hide what both are late by.
        for healthy in sorted(others, key=lambda each: each in suspects)[:1]:
            return Chosen((*chosen, healthy), f"{why}; rank {healthy.rank} beside it")
    return Chosen(tuple(chosen), why)


def _asked_for(found: Sequence[Candidate], ranks: Sequence[int]) -> list[Candidate]:
    runs = {each.process.of_run for each in found if each.rank in ranks}
    if len(runs) > 1:
        names = ", ".join(sorted(cell(run) for _, run in runs))
        raise NotFound(f"Several runs here have such a rank: {names}. Choose one by --run.")
    newest = {each.rank: each for each in found}
    for rank in ranks:
        if rank not in newest:
            known = ", ".join(map(str, sorted(newest)))
            raise NotFound(f"Rank {rank} is not known on this node; known are: {known}.")
    return [newest[rank] for rank in dict.fromkeys(ranks)]


def _is_named(each: Candidate, verdict: Mapping[str, Any]) -> bool:
    who = verdict["who"]
    run = cell(who.get("group")), cell(who.get("run"))
    return run == each.process.of_run and str(each.rank) in named_ranks(verdict)
