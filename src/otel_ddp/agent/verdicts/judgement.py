"""What is said of a run in the end: its verdicts, and how its ranks compare.

Where another agent leads the run, it says that, and the agent of this node shows and exports it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from otel_ddp.agent.verdicts.reports import RunReports
from otel_ddp.diagnosis.straggler.finding import Report, is_about, side_of
from otel_ddp.diagnosis.verdict import Labels, node_of
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


# What comes of comparing ranks.
_OF_COMPARISON: frozenset[str] = frozenset(("straggler", "imbalance", "recurring"))
# So much later than here, a lead that compares all ranks has compared them.
_LEAD_LATER_NS = 10_000_000_000


class Led:
    """Whether another agent judges a run, and what it leaves to this one."""

    def __init__(self) -> None:
        self.judgement: Judgement | None = None
        """What it says; None: this agent judges the run."""
        self.compares_alone = False
        """It has not the data to compare all ranks, and this agent has those to compare its own."""
        self._since_ns = 0

    def update(
        self, judgement: Judgement | None, compares: Callable[[], bool], now_ns: int
    ) -> None:
        """*compares*: whether this agent can compare its own ranks."""
        self.judgement = judgement
        if (
            judgement is None
            or not judgement.report.insufficient
            # It has compared where it has named a rank.
            or any(each.get("kind") in _OF_COMPARISON for each in judgement.open)
        ):
            self.compares_alone, self._since_ns = False, 0
        elif not self.compares_alone:
            self._since_ns = (self._since_ns or now_ns) if compares() else 0
            waited_ns = now_ns - self._since_ns if self._since_ns else 0
            self.compares_alone = waited_ns >= _LEAD_LATER_NS

    def stands(self, kind: Kind) -> bool:
        """Whether verdicts of this kind are those that this agent finds."""
        return self.judgement is None or (self.compares_alone and kind in _OF_COMPARISON)


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
