"""Shows what is found of a run as series: who is late and by how much, who stands still."""

from __future__ import annotations

from otel_ddp import catalog, containment
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.room import Room


class VerdictSeries:
    """One a node, for all of its runs. The caller holds the ledger's lock."""

    def __init__(self, ledger: Ledger, origin_ns: int) -> None:
        """*origin_ns*: since when counters count, in nanoseconds since 1970."""
        self._ledger = ledger
        self._origin_ns = origin_ns

    def stand(self, room: Room, now_ns: int) -> None:
        """Bring the series of this run up to date."""
        room.showing = set()
        self._stand_speed(room, now_ns)
        self._stand_own_collectives(room, now_ns)
        self._stand_stalls(room, now_ns)
        for metric, labels in room.shown - room.showing:
            self._ledger.forget(self._ledger.series(metric, labels))
        room.shown = room.showing

    @containment.contained()
    def _stand_speed(self, room: Room, now_ns: int) -> None:
        if room.report is None or room.report_is_old:
            room.report_is_old = False
            told_by = room.arrivals if room.arrivals.wanted else room.stragglers
            room.report = told_by.report()
        report = room.report
        for rank in report.ranks:
            self._put(catalog.TRAINING_STRAGGLER_LOST_TIME, rank.who, rank.lost_s, now_ns)
            late = rank.phase if rank.kind == "straggler" else None
            for phase in {phase for who, phase in room.named if who == rank.who}:
                where = ("phase", phase)
                value = float(phase == late)
                self._put(catalog.TRAINING_STRAGGLER, rank.who, value, now_ns, where)
            if report.insufficient:
                continue
            # Without a phase: that there is nothing to say of a rank is something that was seen.
            self._show(room, catalog.TRAINING_STRAGGLER, rank.who, 0.0, now_ns, ("phase", ""))
            for phase, share in rank.excess.items():
                where = ("phase", phase)
                self._show(room, catalog.TRAINING_STRAGGLER_EXCESS, rank.who, share, now_ns, where)
        if report.work_max_s is not None and report.work_median_s is not None:
            self._show(room, catalog.TRAINING_NODE_WORK_MAX, room.node, report.work_max_s, now_ns)
            self._show(
                room, catalog.TRAINING_NODE_WORK_MEDIAN, room.node, report.work_median_s, now_ns
            )

    @containment.contained()
    def _stand_own_collectives(self, room: Room, now_ns: int) -> None:
        for who, phases in room.own.items():
            for phase in phases:
                metric = catalog.TRAINING_OWN_COLLECTIVES
                self._show(room, metric, who, 1.0, now_ns, ("phase", phase))

    @containment.contained()
    def _stand_stalls(self, room: Room, now_ns: int) -> None:
        for who, limit_s in room.stalls.limits.items():
            self._show(room, catalog.TRAINING_STALL_TIMEOUT, who, limit_s, now_ns)
            stalled = float(room.stalls.stalled.get(who, False))
            self._show(room, catalog.TRAINING_STALLED, who, stalled, now_ns)
        for who, reason in room.stalls.reasons.items():
            code = float(catalog.STALL_REASONS[reason])
            self._show(room, catalog.TRAINING_STALL_REASON, who, code, now_ns)
        for who, groups in room.heard.items():
            for group in groups:
                for metric, number in (
                    (catalog.TRAINING_COLLECTIVE_ENQUEUED, group.enqueued),
                    (catalog.TRAINING_COLLECTIVE_COMPLETED, group.completed),
                ):
                    if number is not None:
                        where = ("process_group", group.name)
                        self._show(room, metric, who, float(number), now_ns, where)

    def _show(
        self,
        room: Room,
        metric: catalog.Metric,
        labels: Labels,
        value: float,
        now_ns: int,
        *more: tuple[str, str],
    ) -> None:
        """Put what is true at this moment, and is absent when it is not known any more."""
        room.showing.add((metric, (*labels, *more)))
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
