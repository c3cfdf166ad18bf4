"""What is compared with its like: the ranks of a run, and its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.vocabulary.words import NODE_LABELS


class Unit(NamedTuple):
    """A rank, or a node with all of its ranks."""

    labels: Labels
    members: tuple[int, ...]
    """The places of its ranks in a row."""


def ranks_of(ranks: Sequence[Labels]) -> list[Unit]:
    """Each rank by itself."""
    return [Unit(labels, (i,)) for i, labels in enumerate(ranks)]


def nodes_of(ranks: Sequence[Labels]) -> list[Unit]:
    """The nodes, with their ranks; empty where there is one, or none has several ranks."""
    nodes: dict[Labels, list[int]] = {}
    for i, labels in enumerate(ranks):
        nodes.setdefault(node_of(labels), []).append(i)
    if not 1 < len(nodes) < len(ranks):
        return []
    return [Unit(labels, tuple(members)) for labels, members in nodes.items()]


def node_of(labels: Labels) -> Labels:
    """The labels of the node that a rank is on."""
    return tuple(label for label in labels if label[0] in NODE_LABELS)
