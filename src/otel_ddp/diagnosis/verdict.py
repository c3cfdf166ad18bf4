"""A verdict: one finding about a process, a node or a run, with its evidence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from otel_ddp.vocabulary.words import NODE_LABELS, RUN_LABELS, Kind
from otel_ddp.vocabulary.words import Labels as Labels


class Verdict(NamedTuple):
    """One finding. It stays open until a change with the same key closes it."""

    kind: Kind
    labels: Labels
    """The process that the verdict is about, or the node or run if it is about all its ranks."""
    phase: str
    """A phase of `vocabulary/words.py`, `compute`, `mixed`, or empty."""
    sentence: str
    """The text for people: which rank has which trouble, how much, since when, and advice."""
    evidence: Mapping[str, Any]
    """Details that can be written as JSON."""
    step: int | None = None
    since_ns: int = 0
    until_ns: int = 0
    """When the trouble ended, if the detector noticed the end only later; else 0."""

    @property
    def key(self) -> tuple[Kind, Labels]:
        """Verdicts with the same kind and labels are about the same incident."""
        return self.kind, self.labels


class Change(NamedTuple):
    """A verdict was opened, changed its phase or cause, or was closed."""

    verdict: Verdict
    opened: bool


def run_labels(labels: Labels) -> Labels:
    """The labels of a process's run."""
    return tuple(label for label in labels if label[0] in RUN_LABELS)


def node_of(labels: Labels) -> Labels:
    """The labels of a rank's node."""
    return tuple(label for label in labels if label[0] in NODE_LABELS)
