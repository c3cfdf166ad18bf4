"""Shows what is found of a run as series: who is late and by how much, who stands still."""

from __future__ import annotations

from otel_ddp import catalog, containment
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.verdicts.run_case import RunCase


class VerdictSeries:
    """One a node, for all of its runs. The caller holds the ledger's lock."""

    def __init__(self, ledger: Ledger, origin_ns: int) -> None:
        """*origin_ns*: since when counters count, in nanoseconds since 1970."""
        self._ledger = ledger
        self._origin_ns = origin_ns

    def update_series(self, case: RunCase, now_ns: int) -> None:
        """Bring the series of this run up to date."""
        case.showing = set()
        self._update_speed(case, now_ns)
        self._update_own_collectives(case, now_ns)
        self._update_stalls(case, now_ns)
        for metric, labels in case.shown - case.showing:
            self._ledger.forget(self._ledger.series(metric, labels))
        case.shown = case.showing

    @containment.contained()
    def _update_speed(self, case: RunCase, now_ns: int) -> None:
        if case.report is None or case.report_is_old:
            case.report_is_old = False
            told_by = case.arrivals if case.arrivals.wanted else case.stragglers
            case.report = told_by.report()
        report = case.report
        for rank in report.ranks:
            self._put(catalog.TRAINING_STRAGGLER_LOST_TIME, rank.who, rank.lost_s, now_ns)
            late = rank.phase if rank.kind == "straggler" else None
            for phase in {phase for who, phase in case.named if who == rank.who}:
                where = ("phase", phase)
                value = float(phase == late)
                self._put(catalog.TRAINING_STRAGGLER, rank.who, value, now_ns, where)
            if report.insufficient:
                continue
            # Without a phase: that there is nothing to say of a rank is something that was seen.
            self._show(case, catalog.TRAINING_STRAGGLER, rank.who, 0.0, now_ns, ("phase", ""))
            for phase, share in rank.excess.items():
                where = ("phase", phase)
                self._show(case, catalog.TRAINING_STRAGGLER_EXCESS, rank.who, share, now_ns, where)
        if report.work_max_s is not None and report.work_median_s is not None:
            self._show(case, catalog.TRAINING_NODE_WORK_MAX, case.node, report.work_max_s, now_ns)
            self._show(
                case, catalog.TRAINING_NODE_WORK_MEDIAN, case.node, report.work_median_s, now_ns
            )

    @containment.contained()
    def _update_own_collectives(self, case: RunCase, now_ns: int) -> None:
        for who, phases in case.own.items():
            for phase in phases:
                metric = catalog.TRAINING_OWN_COLLECTIVES
                self._show(case, metric, who, 1.0, now_ns, ("phase", phase))

    @containment.contained()
    def _update_stalls(self, case: RunCase, now_ns: int) -> None:
        for who, limit_s in case.stalls.limits.items():
            self._show(case, catalog.TRAINING_STALL_TIMEOUT, who, limit_s, now_ns)
            stalled = float(case.stalls.stalled.get(who, False))
            self._show(case, catalog.TRAINING_STALLED, who, stalled, now_ns)
        for who, reason in case.stalls.reasons.items():
            code = float(catalog.STALL_REASONS[reason])
            self._show(case, catalog.TRAINING_STALL_REASON, who, code, now_ns)
        for who, groups in case.heard.items():
            for group in groups:
                for metric, number in (
                    (catalog.TRAINING_COLLECTIVE_ENQUEUED, group.enqueued),
                    (catalog.TRAINING_COLLECTIVE_COMPLETED, group.completed),
                ):
                    if number is not None:
                        where = ("process_group", group.name)
                        self._show(case, metric, who, float(number), now_ns, where)

    def _show(
        self,
        case: RunCase,
        metric: catalog.Metric,
        labels: Labels,
        value: float,
        now_ns: int,
        *more: tuple[str, str],
    ) -> None:
        """Put what is true at this moment, and is absent when it is not known any more."""
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
