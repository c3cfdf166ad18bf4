"""Reports that the lead has not confirmed, bounded: the oldest go first, and their steps count."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple


class _Pending(NamedTuple):
    report: Any
    size: int
    steps: int


class PendingReports:
    """The agent's loop adds to it. The thread of links sends, and drops what is confirmed."""

    def __init__(self, most_bytes: int, most_reports: int) -> None:
        self._most_bytes, self._most_reports = most_bytes, most_reports
        self._reports: deque[_Pending] = deque()
        self._bytes = self._number = 0
        self._lock = threading.Lock()
        self.dropped = self.dropped_steps = 0

    def add(self, report: Any, steps: int, most_report_bytes: int) -> None:
        """Number a report and keep it; one of more bytes than it may have is dropped at once."""
        size = report.ByteSize()
        with self._lock:
            self._number += 1
            report.number = self._number
            self._reports.append(_Pending(report, size, steps))
            self._bytes += size
            if size > most_report_bytes:
                self._drop(self._reports.pop())
            while self._bytes > self._most_bytes or len(self._reports) > self._most_reports:
                self._drop(self._reports.popleft())

    def _drop(self, each: _Pending) -> None:
        self._bytes -= each.size
        self.dropped += 1
        self.dropped_steps += each.steps

    def after(self, number: int) -> Any | None:
        """The oldest report with a higher number."""
        with self._lock:
            return next(
                (each.report for each in self._reports if each.report.number > number), None
            )

    def confirm(self, number: int) -> None:
        """The lead has this report and all before it."""
        with self._lock:
            while self._reports and self._reports[0].report.number <= number:
                self._bytes -= self._reports.popleft().size
