"""What a verdict is: one finding about a process, a node or a run, with its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from otel_ddp.vocabulary.words import NODE_LABELS, RUN_LABELS, Kind
from otel_ddp.vocabulary.words import Labels as Labels


class Verdict(NamedTuple):
    """One finding. It stays open until a change with the same key closes it."""

    kind: Kind
    labels: Labels
    """The process that it is about; or the node or run, where it is about all ranks."""
    phase: str
    """The phase that it is in: a word of the catalogue, `compute`, `mixed`, or empty."""
    sentence: str
    """For people: which rank, what, how much, since when, and where to look."""
    evidence: Mapping[str, Any]
    """The numbers and words behind it: plain JSON."""
    step: int | None = None
    since_ns: int = 0
    """When it began, as far as that is known; since 1970."""
    until_ns: int = 0
    """Of what is over: when it ended, if that is known to be before it was noticed."""

    @property
    def key(self) -> tuple[Kind, Labels]:
        """Two verdicts with the same key are the same incident."""
        return self.kind, self.labels


class Change(NamedTuple):
    """A verdict was opened, or has another phase or cause now; or it is over."""

    verdict: Verdict
    opened: bool


def run_labels(labels: Labels) -> Labels:
    """The labels of the run that a process belongs to, whatever its role."""
    return tuple(label for label in labels if label[0] in RUN_LABELS)


def node_of(labels: Labels) -> Labels:
    """The labels of the node that a rank is on."""
    return tuple(label for label in labels if label[0] in NODE_LABELS)
