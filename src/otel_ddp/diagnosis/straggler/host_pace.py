"""Does not blame a rank for a pace at which all hosts go.

Where all hosts are slow alike, by their loaders or by launching, one happens to be ahead of its
device. That device never runs dry, and waits for the others. These run dry all the time, and the
time that they idle would look like lateness. What a rank can really be late by is what its own host
needs more than the others' hosts.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

from otel_ddp.diagnosis.medians import excesses, median, without
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler import limits
from otel_ddp.diagnosis.straggler.alignment import Row
from otel_ddp.diagnosis.straggler.host_need import HostNeed
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.vocabulary.words import COMPUTE_PHASES, WORK_PHASES

_DATA = WORK_PHASES.index("data")
_COMPUTE = [WORK_PHASES.index(word) for word in COMPUTE_PHASES]


class _MoreNs(NamedTuple):
    """What a host usually needs more than the others'."""

    by_phase: tuple[float, ...]
    data_for_sure: float
    """Of `data`, if other loaders are still as slow as they were."""
    launches_alike: bool
    """At least half of the other hosts are known to need as long to launch a step."""


class HostPace:
    """The hosts of the ranks of one run on this node."""

    def __init__(self) -> None:
        self._hosts: dict[Labels, HostNeed] = {}
        # Of the ranks that are compared, in their order.
        self._compared: list[HostNeed] = []
        self.unclear = 0.0
        """The share of a step that some rank's device waits for its host beyond what this is known
        to need more than the others, who may or may not be faster."""

    def begin(self, labels: Labels, steps: Sequence[StepFacts]) -> None:
        """More steps of a rank, as soon as they are known."""
        if steps and steps[0].host_ns is not None:
            self._hosts.setdefault(labels, HostNeed()).begin(steps)

    def forget(self, labels: Labels) -> None:
        """The process has ended."""
        self._hosts.pop(labels, None)

    def start_again(self, ranks: Sequence[Labels]) -> None:
        """From now on these ranks are compared, in this order."""
        self._compared = [self._hosts.setdefault(labels, HostNeed()) for labels in ranks]
        self.unclear = 0.0

    def adjusted(self, row: Row) -> Row:
        """The step with what is no lateness counted as waiting."""
        facts = row.facts
        if not self.follow(facts):
            return row
        late_ns = _by_rank([_above_least([each.phases_ns[at] for each in facts]) for at in _PHASES])
        idle_ns = [_idle_ns(*each) for each in zip(facts, late_ns, strict=True)]
        if not any(map(any, idle_ns)):
            self.unclear -= limits.PACE_FORGETS * self.unclear
            return row
        more_ns = self._more_ns(facts[0].took_ns)
        pairs = [_adjusted(*each) for each in zip(facts, idle_ns, more_ns, strict=True)]
        most = max(unclear_ns / each.took_ns for each, unclear_ns in pairs)
        self.unclear += limits.PACE_FORGETS * (most - self.unclear)
        return Row(row.number, tuple([each for each, _ in pairs]))

    def follow(self, facts: tuple[StepFacts, ...]) -> bool:
        """Learn what hosts usually need; whether there are devices that they may be ahead of."""
        if any(each.host_ns is None for each in facts):
            return False
        for host, each in zip(self._compared, facts, strict=True):
            host.follow(each)
        return True

    def _more_ns(self, step_ns: int) -> list[_MoreNs]:
        """What each host usually needs more than the others', where a step takes this long."""
        wait = any(each.waits for each in self._compared)
        usual_ns = [each.usual_ns(wait) for each in self._compared]
        more_ns = _by_rank([excesses([each[at] for each in usual_ns]) for at in _PHASES])
        launches_ns = [each.launches.usual_ns(step_ns) for each in self._compared]
        found = []
        for i, (host, each_ns) in enumerate(zip(self._compared, more_ns, strict=True)):
            loads_ns = [each.loads_ns(host) for each in self._compared]
            known_ns = host.waits_ns - median(without(loads_ns, i))
            alike = _are_alike(launches_ns[i], without(launches_ns, i))
            found.append(_MoreNs(each_ns, min(known_ns, each_ns[_DATA]), alike))
        return found


_PHASES = range(len(WORK_PHASES))


def _are_alike(own_ns: float, others_ns: list[float]) -> bool:
    """Whether at least half of the other hosts need as long; 0 is what is not known."""
    known = sum(each >= limits.PACE_ALIKE * own_ns > 0 for each in others_ns)
    return 2 * known >= len(others_ns)


def _above_least(values: list[int]) -> list[float]:
    # Not above the median of the others: of three ranks two may idle, each as long as the other,
    # and half of that would be left to both.
    least = min(values)
    return [each - least for each in values]


def _by_rank(by_phase: list[list[float]]) -> list[tuple[float, ...]]:
    return list(zip(*by_phase, strict=True))


def _idle_ns(facts: StepFacts, late_ns: tuple[float, ...]) -> list[int]:
    """Of what its device needed more than the one that needed least: the time without work."""
    paced_ns = facts.paced_ns or (0,) * len(_PHASES)
    return [
        round(late) if late > 0 and 2 * paced > took else 0
        for late, paced, took in zip(late_ns, paced_ns, facts.phases_ns, strict=True)
    ]


def _adjusted(facts: StepFacts, idle_ns: list[int], more_ns: _MoreNs) -> tuple[StepFacts, float]:
    """The step of one rank, its idle time in the phases in which its host is late; and what was
    cut of it, without what is known to be no lateness."""
    all_ns = sum(idle_ns)
    if not all_ns:
        return facts, 0.0
    least_ns = facts.took_ns / limits.PACE_SMALL
    needs_ns = [each if each > least_ns else 0.0 for each in more_ns.by_phase]
    hidden_ns = min(needs_ns[_DATA], needs_ns[_DATA] - more_ns.data_for_sure)
    needs_ns[_DATA] = more_ns.data_for_sure if more_ns.data_for_sure > least_ns else 0.0
    kept = min(all_ns / sum(needs_ns), 1.0) if any(needs_ns) else 0.0
    # A host that was late in one phase lets its device run dry in a later one.
    kept_ns = [round(kept * each) - idle for each, idle in zip(needs_ns, idle_ns, strict=True)]
    found = facts._replace(
        phases_ns=tuple(map(add, facts.phases_ns, kept_ns)),
        paced_ns=tuple(map(add, facts.paced_ns or idle_ns, kept_ns)),
        wait_ns=facts.wait_ns - sum(kept_ns),
    )
    clear_ns = max(idle_ns[_DATA] - hidden_ns, 0)
    if more_ns.launches_alike:
        clear_ns += sum(map(idle_ns.__getitem__, _COMPUTE))
    return found, max(-sum(kept_ns) - clear_ns, 0.0)
