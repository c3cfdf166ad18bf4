"""Chooses the ranks to profile, asks each through the fifo beside its journal, and waits."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import files
from otel_ddp.agent.reading.node_status import survey
from otel_ddp.agent.reading.steps import recent_steps
from otel_ddp.cli.text import cell, integer
from otel_ddp.diagnosis.medians import lower_median
from otel_ddp.journal.layout import ASK_SUFFIX, PROFILE_SUFFIX
from otel_ddp.journal.locks import lock_holder
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import JournalReader, Unreadable

_LARGEST_ANSWER = 64 * 1024


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
        suspects = [_suspect(found, survey(list(places)).verdicts)]
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
                recent = recent_steps(reader)
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
        who = verdict["who"]
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

    @property
    def is_over(self) -> bool:
        return self.state in ("written", "refused", "failed")

    def ask(self, steps: int, wait_s: float) -> None:
        """Ask; the window must begin within that time."""
        if self.rank.user != os.geteuid():
            # Root could ask, but the process may not write to a folder of root's.
            self._refuse(f"only its own user may ask it, which is user {self.rank.user}")
            return
        now_ns = time.time_ns()
        self._number = now_ns
        question = {
            "number": now_ns,
            "steps": steps,
            "trace": str(self.trace),
            "until_ns": now_ns + int(wait_s * 1e9),
        }
        # In one write, which a fifo takes as a whole.
        line = f"profile {json.dumps(question)}\n"
        try:
            files.tell(self.rank.journal.with_suffix(ASK_SUFFIX), line)
        except OSError:
            self._refuse(
                "it takes no questions: it has not called otel_ddp.instrument, or is about to end"
            )

    def poll(self) -> None:
        """Look for an answer."""
        if self.is_over:
            return
        answer = files.read_mapping(self.rank.journal.with_suffix(PROFILE_SUFFIX), _LARGEST_ANSWER)
        state, number = answer.get("state"), answer.get("number")
        if number == self._number:
            self.state = state if isinstance(state, str) else "failed"
            self.why = cell(answer.get("why"))
            self.steps = integer(answer.get("steps")) or 0
            self.first_step = integer(answer.get("first_step"))
        elif self.state == "waiting" and state == "recording":
            self._refuse("another profile of this rank is under way")
        if not self.is_over and lock_holder(self.rank.journal) is None:
            self._refuse("it ended")

    def give_up(self, why: str) -> None:
        """Nobody waits for it any longer."""
        if not self.is_over:
            self._refuse(why)

    def _refuse(self, why: str) -> None:
        self.state, self.why = "refused", why
