"""The series of the best values of one process."""

from __future__ import annotations

from otel_ddp import catalog
from otel_ddp.agent.ledger import Labels, Ledger, Series
from otel_ddp.agent.reading.summary import Summary
from otel_ddp.journal.direction import direction
from otel_ddp.journal.reader import JournalReader


class BestValues:
    """One a process. The caller of every method holds the ledger's lock."""

    def __init__(self, reader: JournalReader, ledger: Ledger) -> None:
        self._reader = reader
        self._ledger = ledger
        self._shown: set[tuple[catalog.Metric, Labels]] = set()

    def update(self, labels: Labels, summary: Summary, now_ns: int) -> None:
        """Write the best values of this summary into the ledger."""
        best = self._reader.facts.get("best")
        chosen = best if isinstance(best, dict) else {}
        shown = set()
        for (name, split), extremes in summary.items():
            way = direction(name, chosen)
            if not way:
                continue
            point = extremes.best(way)
            more = (*labels, ("name", name), ("split", split), ("direction", way))
            for metric, value in (
                (catalog.TRAINING_SCALAR_BEST, point.value),
                (catalog.TRAINING_SCALAR_BEST_STEP, point.step),
            ):
                if value is not None:
                    series = self._series(metric, more)
                    series.value, series.time_ns = float(value), now_ns
                    shown.add((metric, more))
        # The user may say another direction, and a value that is better may have no step.
        for metric, more in self._shown - shown:
            self._ledger.forget(self._series(metric, more))
        self._shown = shown

    def _series(self, metric: catalog.Metric, labels: Labels) -> Series:
        project = str(self._reader.identity.get("project") or "")
        return self._ledger.series(metric, labels, self._reader.created_ns, project)
