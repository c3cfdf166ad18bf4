"""What is said of a run in the end: its verdicts, and how its ranks compare.

Where another agent leads the run, it says that, and the agent of this node shows and exports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from otel_ddp.agent.verdicts.reports import RunReports
from otel_ddp.diagnosis.straggler.finding import Report, is_about, side_of
from otel_ddp.diagnosis.straggler.units import node_of
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.vocabulary.words import Kind


class Named(NamedTuple):
    """A finding about a rank or node, a phase, maybe a side; its series goes on when it is over."""

    kind: Kind
    labels: Labels
    phase: str
    side: str
    now: bool
    """Whether it is true now."""


@dataclass(frozen=True)
class Judgement:
    """Of one run, by the agent that leads it."""

    by: str
    """The node of that agent."""
    open: Sequence[Mapping[str, Any]]
    """The open verdicts as JSON; so are those that are over."""
    past: Sequence[Mapping[str, Any]]
    report: Report
    named: Sequence[Named]
    compared: int
    """How many ranks of all nodes are compared."""


def compared_ranks(report: Report) -> int:
    """How many ranks are compared."""
    return sum([each.work_s is not None for each in report.ranks])


def named(reports: RunReports) -> Iterator[Named]:
    """All that was ever named."""
    for kind, labels, phase, side in reports.named:
        incident = reports.open.get((kind, labels))
        if incident is None:
            of_node = reports.open.get((kind, node_of(labels)))
            incident = of_node if of_node and is_about(of_node.shown, labels) else None
        now = incident and (incident.shown.phase, side and side_of(incident.shown))
        yield Named(kind, labels, phase, side, now == (phase, side))
