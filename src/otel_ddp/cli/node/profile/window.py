"""Chooses the ranks to profile, asks each through the fifo beside its journal, and waits."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import files
from otel_ddp.cli.text import cell, integer, named_ranks
from otel_ddp.journal.layout import ASK_SUFFIX, PROFILE_SUFFIX
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import survey

_LARGEST_ANSWER = 64 * 1024


class NotFound(Exception):
    """There is nothing to profile; the text says why, and what to do."""


class Candidate(NamedTuple):
    """A living rank."""

    journal: Path
    process: ProcessState

    @property
    def rank(self) -> int:
        return self.process.rank or 0

    @property
    def label(self) -> str:
        return f"rank {self.rank}"

    @property
    def is_here(self) -> bool:
        """Whether it runs on this node; the agent tells of others."""
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
    known: list[Candidate] = []
    verdicts: list[Mapping[str, Any]] = []
    for place in places:
        here = survey([place])
        verdicts += here.verdicts
        known += [
            Candidate(place.directory / each.journal, each)
            for each in here.processes
            if not each.ended and each.rank is not None and run in ("", each.run)
        ]
    found = [each for each in known if each.is_here]
    for each in known:
        if each.rank in ranks and not each.is_here and each.rank not in {e.rank for e in found}:
            node = cell(each.process.node)
            raise NotFound(f"Rank {each.rank} runs on {node}: profile it there.")
    # Evaluators and processes that only log give way to a rank of the same number that trains.
    found.sort(key=lambda each: each.takes_questions)
    if not found:
        which = f"no rank of the run {run!r}" if run else "no rank"
        raise NotFound(f"{which} runs on this node.")
    suspects = [who for told in verdicts for who in reversed(found) if _is_named(who, told)]
    if ranks:
        chosen, why = _asked_for(found, ranks), "named"
    elif suspects:
        chosen, why = suspects[:1], f"{suspects[0].label} is named by a verdict"
    else:
        raise NotFound("No open verdict names a rank of this node: say which one by --rank.")
    if len(chosen) == 1:
        of_run, rank = chosen[0].process.of_run, chosen[0].rank
        others = [
            each
            for each in found
            if each.takes_questions and each.process.of_run == of_run and each.rank != rank
        ]
        # One that is late as well would hide what both are late by.
        for healthy in sorted(others, key=lambda each: each in suspects)[:1]:
            return Chosen((*chosen, healthy), f"{why}; {healthy.label} is compared with it")
    return Chosen(tuple(chosen), why)


def _asked_for(found: Sequence[Candidate], ranks: Sequence[int]) -> list[Candidate]:
    runs = {each.process.of_run for each in found if each.rank in ranks}
    if len(runs) > 1:
        names = ", ".join(sorted(cell(run) for _, run in runs))
        raise NotFound(f"Several runs here have such a rank: {names}. Choose one by --run.")
    newest = {each.rank: each for each in found}
    for rank in ranks:
        if rank not in newest:
            here = ", ".join(map(str, sorted(newest)))
            raise NotFound(f"Rank {rank} does not run on this node; here are: {here}.")
    return [newest[rank] for rank in dict.fromkeys(ranks)]


def _is_named(each: Candidate, verdict: Mapping[str, Any]) -> bool:
    who = verdict["who"]
    run = cell(who.get("group")), cell(who.get("run"))
    return run == each.process.of_run and str(each.rank) in named_ranks(verdict)


class Window:
    """One rank that is profiled."""

    def __init__(self, rank: Candidate, trace: Path) -> None:
        self.rank = rank
        self.trace = trace
        """Where the process writes it, not compressed."""
        self.state = "waiting"
        """Then `recording`, and at last `written`, or `refused` or `failed`, with a reason."""
        self.why = ""
        self.steps = 0
        self.first_step: int | None = None
        self._number = 0

    def ask(self, steps: int, wait_s: float) -> None:
        """Ask; the window must begin within that time."""
        self._number = time.time_ns()
        question = {
            "number": self._number,
            "steps": steps,
            "trace": str(self.trace),
            "until_ns": self._number + int(wait_s * 1e9),
        }
        try:
            # In one write, which a fifo takes as a whole.
            line = f"profile {json.dumps(question)}\n"
            files.tell(self.rank.journal.with_suffix(ASK_SUFFIX), line)
        except OSError:
            self.refuse(
                "it takes no questions: it has not called otel_ddp.instrument, or is about to end"
            )

    def poll(self) -> None:
        """Look for an answer."""
        answer = files.read_mapping(self.rank.journal.with_suffix(PROFILE_SUFFIX), _LARGEST_ANSWER)
        state = answer.get("state")
        if not self._is_over and answer.get("number") == self._number:
            self.state = state if isinstance(state, str) else "failed"
            self.why = cell(answer.get("why"))
            self.steps = integer(answer.get("steps")) or 0
            self.first_step = integer(answer.get("first_step"))
        elif self.state == "waiting" and state == "recording":
            self.refuse("another profile of this rank is under way")
        if files.lock_holder(self.rank.journal) is None:
            self.refuse("it ended")

    def refuse(self, why: str) -> None:
        """There will be no answer, unless there is one."""
        if not self._is_over:
            self.state, self.why = "refused", why

    @property
    def _is_over(self) -> bool:
        return self.state not in ("waiting", "recording")

    def answer(self) -> dict[str, Any]:
        """How it ended, for `profile.json`."""
        return {name: getattr(self, name) for name in ("state", "why", "steps", "first_step")}
