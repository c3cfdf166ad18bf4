"""Does not blame a rank for a pace at which all hosts go.

Where all hosts are slow alike, by their loaders or by launching, one happens to be ahead of its
device. That device never runs dry, and waits for the others. These run dry all the time, and the
time that they idle would look like lateness. What a rank can really be late by is what its own host
needs more than the others' hosts.
"""

from __future__ import annotations

from operator import add

from otel_ddp.diagnosis.alignment import Row
from otel_ddp.diagnosis.medians import excesses
from otel_ddp.diagnosis.step_facts import WORK_PHASES, StepFacts

# A host's usual time in a phase follows it this fast, and no pause moves it by more than this.
_FOLLOWS = 0.05
_FAR = 3.0
# How fast the share of the step that is not told as lateness is forgotten.
_FORGETS = 0.02
# What a host needs more in a phase is none where it is less than one part of the step in so many.
_SMALL = 64
_DATA = WORK_PHASES.index("data")

_PhasesNs = list[float]


class HostPace:
    """The hosts of the ranks of one run on this node."""

    def __init__(self) -> None:
        self._usual_ns: list[_PhasesNs] = []
        self.unclear = 0.0
        """The share of a step that some rank's device waits for launches beyond what its host is
        known to need more than the others, who may or may not launch faster."""

    def clear(self) -> None:
        """Forget all: the ranks are others now."""
        self._usual_ns = []
        self.unclear = 0.0

    def adjusted(self, row: Row) -> Row:
        """The step with what is no lateness counted as waiting."""
        facts = row.facts
        if any(each.host_ns is None for each in facts):
            return row
        self._follow(facts)
        late_ns = _by_rank([_above_least([each.phases_ns[at] for each in facts]) for at in _PHASES])
        host_ns = _by_rank([excesses([each[at] for each in self._usual_ns]) for at in _PHASES])
        pairs = [_adjusted(*each) for each in zip(facts, late_ns, host_ns, strict=True)]
        most = max(cut_ns / each.took_ns for each, cut_ns in pairs)
        self.unclear += _FORGETS * (most - self.unclear)
        return Row(row.number, tuple([each for each, _ in pairs]))

    def _follow(self, facts: tuple[StepFacts, ...]) -> None:
        if len(self._usual_ns) != len(facts):
            self._usual_ns = [[float(ns) for ns in each.host_ns or ()] for each in facts]
        for usual_ns, each in zip(self._usual_ns, facts, strict=True):
            for at, ns in enumerate(each.host_ns or ()):
                usual_ns[at] += _FOLLOWS * (min(ns, _FAR * usual_ns[at] + 1) - usual_ns[at])


_PHASES = range(len(WORK_PHASES))


def _above_least(values: list[int]) -> list[float]:
    # Not above the median of the others: of three ranks two may idle, each as long as the other,
    # and half of that would be left to both.
    least = min(values)
    return [each - least for each in values]


def _by_rank(by_phase: list[list[float]]) -> list[tuple[float, ...]]:
    return list(zip(*by_phase, strict=True))


def _adjusted(
    facts: StepFacts, late_ns: tuple[float, ...], host_late_ns: tuple[float, ...]
) -> tuple[StepFacts, float]:
    """The step of one rank, its idle time in the phases in which its host is late; and what was
    cut of it, in other phases than data.

    *late_ns*: what its device needed more than the one that needed least, in each phase;
    *host_late_ns*: what its host usually needs more than the others.
    """
    paced_ns = facts.paced_ns or (0,) * len(_PHASES)
    idle_ns = [
        round(late) if late > 0 and 2 * paced > took else 0
        for late, paced, took in zip(late_ns, paced_ns, facts.phases_ns, strict=True)
    ]
    all_ns = sum(idle_ns)
    if not all_ns:
        return facts, 0.0
    least_ns = facts.took_ns / _SMALL
    known_ns = [each if each > least_ns else 0.0 for each in host_late_ns]
    kept = min(all_ns / sum(known_ns), 1.0) if any(known_ns) else 0.0
    # A host that was late in one phase lets its device run dry in a later one.
    more_ns = [round(kept * each) - idle for each, idle in zip(known_ns, idle_ns, strict=True)]
    found = facts._replace(
        phases_ns=tuple(map(add, facts.phases_ns, more_ns)),
        paced_ns=tuple(map(add, paced_ns, more_ns)),
        wait_ns=facts.wait_ns - sum(more_ns),
    )
    return found, float(max(-sum(more_ns) - idle_ns[_DATA], 0))
