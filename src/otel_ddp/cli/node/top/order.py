"""Filters, sorts and groups the ranks that `otel-ddp top` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from otel_ddp.cli.node.top.watch import RankView, RunView, View

SORTS = ("rank", "work", "phase for", "step", "state")
GROUPS = ("run", "node", "none")


class Choice(NamedTuple):
    """What a person has chosen by keys."""

    sort: str = "rank"
    group: str = "run"
    filter: str = ""


class Section(NamedTuple):
    """A heading, and the ranks under it."""

    title: str
    run: RunView | None
    """Where the section is one run."""
    ranks: tuple[RankView, ...]
    most_ns: float
    """The longest own time in the steps of the runs shown here: the full bar."""


def sections(view: View, choice: Choice) -> list[Section]:
    """The ranks in the chosen order; sections without any are left out."""
    kept = [(run, rank) for run in view.runs for rank in run.ranks if _matches(run, rank, choice)]
    if choice.group == "run":
        return [
            Section(_title(run), run, _sorted(ranks, choice), _most_ns(run.ranks))
            for run in view.runs
            if (ranks := [rank for each, rank in kept if each is run])
        ]
    names = sorted({rank.text("node", "?") for _, rank in kept})
    if choice.group == "none":
        names = [""] if kept else []
    found = []
    for name in names:
        ranks = [rank for _, rank in kept if not name or rank.text("node", "?") == name]
        title = f"node {name}" if name else ""
        found.append(Section(title, None, _sorted(ranks, choice), _most_ns(ranks)))
    return found


def _title(run: RunView) -> str:
    return f"run {run.name}" + (f", group {run.group}" if run.group else "")


def _matches(run: RunView, rank: RankView, choice: Choice) -> bool:
    words = choice.filter.lower().split()
    texts = [run.name, run.group, f"rank {rank.rank}", f"rank={rank.rank}"]
    texts += [rank.text(name) for name in ("node", "job_type", "state", "phase", "host")]
    return all(any(word in text.lower() for text in texts) for word in words)


def _sorted(ranks: Sequence[RankView], choice: Choice) -> tuple[RankView, ...]:
    by_rank = sorted(ranks, key=lambda each: (each.rank is None, each.rank or 0, each.key))
    if choice.sort == "work":
        by_rank.sort(key=lambda each: -(each.work_ns or 0.0))
    elif choice.sort == "phase for":
        by_rank.sort(key=lambda each: (each.over, each.process.phase_since_ns))
    elif choice.sort == "step":
        by_rank.sort(key=lambda each: each.process.step or 0)
    elif choice.sort == "state":
        by_rank.sort(key=lambda each: (not each.named, each.text("state")))
    return tuple(by_rank)


def _most_ns(ranks: Sequence[RankView]) -> float:
    return max((step.work_ns for rank in ranks for step in rank.steps), default=0)
