"""Writes what is found of a run into the ledger: late ranks, lost time, stalls, collectives."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from otel_ddp import errors
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.verdicts.run_case import RunCase
from otel_ddp.diagnosis.straggler.finding import side_of
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import STALL_REASONS, Kind

# The series of verdicts that name a rank and a phase.
_OF_RANKS: Mapping[Kind, catalog.Metric] = {
    "straggler": catalog.TRAINING_STRAGGLER,
    "imbalance": catalog.TRAINING_IMBALANCE,
    "recurring": catalog.TRAINING_RECURRING_STALL,
}


class VerdictSeries:
    """One per node, for all of its runs. The caller holds the ledger's lock."""

    def __init__(self, ledger: Ledger, origin_ns: int) -> None:
        """*origin_ns*: when the counters began, in nanoseconds since 1970."""
        self._ledger = ledger
        # By run: the series that were true at the last update. Those that are no more get removed.
        self._shown: dict[Labels, set[tuple[catalog.Metric, Labels]]] = {}
        self._showing: set[tuple[catalog.Metric, Labels]] = set()
        self._origin_ns = origin_ns

    def update_series(self, case: RunCase, now_ns: int) -> None:
        """Write what is true of this run now, and remove what no longer is."""
        self._showing = set()
        for update in (self._update_speed, self._update_named, self._update_stalls):
            _contained(update, case, now_ns)
        for labels, phases in case.own_collectives.items():
            for phase in phases:
                self._show(catalog.TRAINING_OWN_COLLECTIVES, labels, 1.0, now_ns, ("phase", phase))
        for metric, labels in self._shown.get(case.run, set()) - self._showing:
            self._ledger.forget(self._ledger.series(metric, labels))
        self._shown[case.run] = self._showing

    def forget(self, run: Labels) -> None:
        """The run is not shown any more."""
        self._shown.pop(run, None)

    def _update_named(self, case: RunCase, now_ns: int) -> None:
        for kind, labels, phase, side in case.reports.named:
            verdict = case.reports.open.get((kind, labels))
            now = None if verdict is None else (verdict.phase, side and side_of(verdict))
            more = [("phase", phase), *([("side", side)] if side else [])]
            self._put(_OF_RANKS[kind], labels, float(now == (phase, side)), now_ns, *more)

    def _update_speed(self, case: RunCase, now_ns: int) -> None:
        report = case.report()
        for rank in report.ranks:
            self._put(catalog.TRAINING_STRAGGLER_LOST_TIME, rank.labels, rank.lost_s, now_ns)
            if report.insufficient:
                continue
            # 0 with an empty phase: the rank was compared and is not late.
            self._show(catalog.TRAINING_STRAGGLER, rank.labels, 0.0, now_ns, ("phase", ""))
            for phase, share in rank.excess.items():
                where = ("phase", phase)
                self._show(catalog.TRAINING_STRAGGLER_EXCESS, rank.labels, share, now_ns, where)
        if report.work_max_s is not None and report.work_median_s is not None:
            self._show(catalog.TRAINING_NODE_WORK_MAX, case.node, report.work_max_s, now_ns)
            self._show(catalog.TRAINING_NODE_WORK_MEDIAN, case.node, report.work_median_s, now_ns)

    def _update_stalls(self, case: RunCase, now_ns: int) -> None:
        for labels, each in case.stalls.standing.items():
            self._show(catalog.TRAINING_STALL_TIMEOUT, labels, each.limit_s, now_ns)
            self._show(catalog.TRAINING_STALLED, labels, float(each.stalled), now_ns)
            if each.reason:
                code = float(STALL_REASONS[each.reason])
                self._show(catalog.TRAINING_STALL_REASON, labels, code, now_ns)
            for group in each.groups:
                # The rules name ranks by these numbers.
                if not group.says_who_waits:
                    continue
                for metric, number in (
                    (catalog.TRAINING_COLLECTIVE_ENQUEUED, group.enqueued),
                    (catalog.TRAINING_COLLECTIVE_COMPLETED, group.device_completed),
                ):
                    if number is not None:
                        where = ("process_group", group.name)
                        self._show(metric, labels, float(number), now_ns, where)

    def _show(
        self,
        metric: catalog.Metric,
        labels: Labels,
        value: float,
        now_ns: int,
        *more: tuple[str, str],
    ) -> None:
        """Write what is true at this moment. The series goes when it is not known any more."""
        self._showing.add((metric, (*labels, *more)))
        self._put(metric, labels, value, now_ns, *more)

    def _put(
        self,
        metric: catalog.Metric,
        labels: Labels,
        value: float,
        now_ns: int,
        *more: tuple[str, str],
    ) -> None:
        self._ledger.put(metric, (*labels, *more), value, now_ns, self._origin_ns)


@errors.contained()
def _contained(update: Callable[[RunCase, int], None], case: RunCase, now_ns: int) -> None:
    update(case, now_ns)
