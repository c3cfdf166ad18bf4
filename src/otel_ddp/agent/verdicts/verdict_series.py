"""Writes what is found of a run into the ledger: late ranks, lost time, stalls, collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from otel_ddp import errors
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.verdicts.judgement import compared_ranks, named
from otel_ddp.agent.verdicts.run_case import RunCase
from otel_ddp.diagnosis.medians import median
from otel_ddp.diagnosis.straggler.units import node_of
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import STALL_REASONS, Kind

# The series of verdicts that name a rank and a phase.
_OF_RANKS: Mapping[Kind, catalog.Metric] = {
    "straggler": catalog.TRAINING_STRAGGLER,
    "imbalance": catalog.TRAINING_IMBALANCE,
    "recurring": catalog.TRAINING_RECURRING_STALL,
}
# The same of a node; its ranks have theirs besides.
_OF_NODES: Mapping[Kind, catalog.Metric] = {
    "straggler": catalog.TRAINING_NODE_STRAGGLER,
    "imbalance": catalog.TRAINING_NODE_IMBALANCE,
}


class _Row(NamedTuple):
    """One series, as it is now."""

    metric: catalog.Metric
    labels: Labels
    value: float
    stays: bool = False
    """Whether it stays when its value is not known any more."""


class VerdictSeries:
    """One per node, for all of its runs. The caller holds the ledger's lock."""

    def __init__(self, ledger: Ledger, origin_ns: int) -> None:
        """*origin_ns*: when the counters began, in nanoseconds since 1970."""
        self._ledger = ledger
        # By run: the series that were true at the last update. Those that are no more get removed.
        self._shown: dict[Labels, set[tuple[catalog.Metric, Labels]]] = {}
        self._origin_ns = origin_ns

    def update_series(self, case: RunCase, now_ns: int) -> None:
        """Write what is true of this run now, and remove what no longer is."""
        shown = set()
        for rows in (_speed, _work, _named, _stalls, _own_collectives):
            for metric, labels, value, stays in _contained(rows, case):
                if not case.is_here(labels):
                    continue
                self._ledger.put(metric, labels, value, now_ns, self._origin_ns)
                if not stays:
                    shown.add((metric, labels))
        for metric, labels in self._shown.get(case.run, set()) - shown:
            self._ledger.forget(self._ledger.series(metric, labels))
        self._shown[case.run] = shown

    def forget(self, run: Labels) -> None:
        """The run is not shown any more."""
        self._shown.pop(run, None)


@errors.contained(default=())
def _contained(rows: Callable[[RunCase], Iterable[_Row]], case: RunCase) -> Iterable[_Row]:
    return list(rows(case))


def _named(case: RunCase) -> Iterator[_Row]:
    led = case.judgement
    for each in named(case.reports) if led is None else led.named:
        of_side = [("side", each.side)] if each.side else []
        where = (*each.labels, ("phase", each.phase), *of_side)
        metric = (_OF_RANKS if "rank" in dict(each.labels) else _OF_NODES)[each.kind]
        yield _Row(metric, where, float(each.now), stays=True)


def _speed(case: RunCase) -> Iterator[_Row]:
    report = case.report()
    led = report if case.judgement is None else case.judgement.report
    for rank in led.ranks:
        if not case.is_here(rank.labels):
            continue
        yield _Row(catalog.TRAINING_STRAGGLER_LOST_TIME, rank.labels, rank.lost_s, stays=True)
        if led.insufficient:
            continue
        # 0 with an empty phase: the rank was compared and is not late.
        yield _Row(catalog.TRAINING_STRAGGLER, (*rank.labels, ("phase", "")), 0.0)
        for phase, share in rank.excess.items():
            yield _Row(catalog.TRAINING_STRAGGLER_EXCESS, (*rank.labels, ("phase", phase)), share)
    works_s: dict[Labels, list[float]] = {}
    for rank in report.ranks:
        if rank.work_s is not None and case.is_here(rank.labels):
            works_s.setdefault(node_of(rank.labels), []).append(rank.work_s)
    compared = compared_ranks(report) if case.judgement is None else case.judgement.compared
    for node, each_s in works_s.items():
        if not led.insufficient:
            yield _Row(catalog.TRAINING_COMPARED_RANKS, node, float(compared))
        yield _Row(catalog.TRAINING_NODE_WORK_MAX, node, max(each_s))
        yield _Row(catalog.TRAINING_NODE_WORK_MEDIAN, node, median(each_s))


def _work(case: RunCase) -> Iterator[_Row]:
    for labels, time in case.work_times.now.items():
        for third, seconds in enumerate(time.thirds_s, 1):
            where = (*labels, ("third", str(third)))
            yield _Row(catalog.TRAINING_WORK_STEP_TIME, where, seconds)
        yield _Row(catalog.TRAINING_WAIT_STEP_TIME, labels, time.rest_s)


def _stalls(case: RunCase) -> Iterator[_Row]:
    for labels, each in case.stalls.standing.items():
        if not case.is_here(labels):
            continue
        yield _Row(catalog.TRAINING_STALL_TIMEOUT, labels, each.limit_s)
        yield _Row(catalog.TRAINING_STALLED, labels, float(each.stalled))
        if each.reason:
            yield _Row(catalog.TRAINING_STALL_REASON, labels, float(STALL_REASONS[each.reason]))
        for group in each.groups:
            # The rules name ranks by these numbers.
            where, says = (*labels, ("process_group", group.name)), group.says_who_waits
            done = group.device_completed
            if says and group.enqueued is not None:
                yield _Row(catalog.TRAINING_COLLECTIVE_ENQUEUED, where, float(group.enqueued))
            if says and done is not None:
                yield _Row(catalog.TRAINING_COLLECTIVE_COMPLETED, where, float(done))


def _own_collectives(case: RunCase) -> Iterator[_Row]:
    for labels, phases in case.own_collectives.items():
        for phase in phases:
            yield _Row(catalog.TRAINING_OWN_COLLECTIVES, (*labels, ("phase", phase)), 1.0)
