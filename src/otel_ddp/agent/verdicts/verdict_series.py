"""Writes what is found of a run into the ledger: late ranks, lost time, stalls, collectives."""

from __future__ import annotations

from collections.abc import Mapping

from otel_ddp import catalog
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.verdicts.run_case import RunCase
from otel_ddp.diagnosis.straggler.finding import side_of
from otel_ddp.diagnosis.verdict import Kind
from otel_ddp.errors import containment
from otel_ddp.words import STALL_REASONS

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
        self._origin_ns = origin_ns

    def update_series(self, case: RunCase, now_ns: int) -> None:
        """Write what is true of this run now, and remove what no longer is."""
        case.showing = set()
        self._update_speed(case, now_ns)
        self._update_named(case, now_ns)
        self._update_own_collectives(case, now_ns)
        self._update_stalls(case, now_ns)
        for metric, labels in case.shown - case.showing:
            self._ledger.forget(self._ledger.series(metric, labels))
        case.shown = case.showing

    @containment.contained()
    def _update_named(self, case: RunCase, now_ns: int) -> None:
        for kind, labels, phase, side in case.named:
            verdict = case.verdicts.get((kind, labels))
            now = None if verdict is None else (verdict.phase, side and side_of(verdict))
            more = [("phase", phase), *([("side", side)] if side else [])]
            self._put(_OF_RANKS[kind], labels, float(now == (phase, side)), now_ns, *more)

    @containment.contained()
    def _update_speed(self, case: RunCase, now_ns: int) -> None:
        if case.report is None or case.report_is_old:
            case.report_is_old = False
            detector = case.arrivals if case.arrivals.wanted else case.stragglers
            case.report = detector.report()
        report = case.report
        for rank in report.ranks:
            self._put(catalog.TRAINING_STRAGGLER_LOST_TIME, rank.labels, rank.lost_s, now_ns)
            if report.insufficient:
                continue
            # 0 with an empty phase: the rank was compared and is not late.
            self._show(case, catalog.TRAINING_STRAGGLER, rank.labels, 0.0, now_ns, ("phase", ""))
            for phase, share in rank.excess.items():
                where = ("phase", phase)
                self._show(
                    case, catalog.TRAINING_STRAGGLER_EXCESS, rank.labels, share, now_ns, where
                )
        if report.work_max_s is not None and report.work_median_s is not None:
            self._show(case, catalog.TRAINING_NODE_WORK_MAX, case.node, report.work_max_s, now_ns)
            self._show(
                case, catalog.TRAINING_NODE_WORK_MEDIAN, case.node, report.work_median_s, now_ns
            )

    @containment.contained()
    def _update_own_collectives(self, case: RunCase, now_ns: int) -> None:
        for labels, phases in case.own_collectives.items():
            for phase in phases:
                metric = catalog.TRAINING_OWN_COLLECTIVES
                self._show(case, metric, labels, 1.0, now_ns, ("phase", phase))

    @containment.contained()
    def _update_stalls(self, case: RunCase, now_ns: int) -> None:
        for labels, limit_s in case.stalls.limits.items():
            self._show(case, catalog.TRAINING_STALL_TIMEOUT, labels, limit_s, now_ns)
            stalled = float(case.stalls.stalled.get(labels, False))
            self._show(case, catalog.TRAINING_STALLED, labels, stalled, now_ns)
        for labels, reason in case.stalls.reasons.items():
            code = float(STALL_REASONS[reason])
            self._show(case, catalog.TRAINING_STALL_REASON, labels, code, now_ns)
        for labels, groups in case.collectives.items():
            for group in groups:
                # The rules name ranks by these numbers.
                if not group.says_who_waits:
                    continue
                for metric, number in (
                    (catalog.TRAINING_COLLECTIVE_ENQUEUED, group.enqueued),
                    (catalog.TRAINING_COLLECTIVE_COMPLETED, group.device_completed),
                ):
                    if number is not None:
                        where = ("process_group", group.name)
                        self._show(case, metric, labels, float(number), now_ns, where)

    def _show(
        self,
        case: RunCase,
        metric: catalog.Metric,
        labels: Labels,
        value: float,
        now_ns: int,
        *more: tuple[str, str],
    ) -> None:
        """Write what is true at this moment. The series goes when it is not known any more."""
        case.showing.add((metric, (*labels, *more)))
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
