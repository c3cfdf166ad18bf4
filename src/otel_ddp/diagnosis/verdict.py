"""What a verdict is: a finding about one process, or about a run, with its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

# One process of a run, as the agent's labels name it: group, run, job_type, node, rank, local_rank.
Who = tuple[tuple[str, str], ...]

Kind = Literal[
    "straggler",  # one rank holds the others back
    "imbalance",  # one rank has more to do than the others
    "regression",  # all ranks are slower than they were
    "bound",  # what most of the step goes to
    "creep",  # memory that grows without end
    "nonfinite",  # a logged value that is not a number any more
    "stall",  # nobody moves any more
    "death",  # a process is gone without a word, or has failed
]


class Verdict(NamedTuple):
    """One finding; it is open until it is closed by one with the same key."""

    kind: Kind
    who: Who
    """Whom it is about: all six labels, or only the run's where it is about all ranks."""
    phase: str
    """The phase that it is in: a word of the catalogue, `compute`, `mixed`, or nothing."""
    sentence: str
    """What a person is told: who, what, how much, since when, what to look at."""
    evidence: Mapping[str, Any]
    """Numbers and words behind it: plain JSON."""
    step: int | None = None
    since_ns: int = 0
    """When it began, as far as that is known; since 1970."""

    @property
    def key(self) -> tuple[str, Who]:
        """What makes two of them the same incident."""
        return self.kind, self.who


class Change(NamedTuple):
    """A verdict was reached, has another phase or cause now, or no longer holds."""

    verdict: Verdict
    opened: bool
