"""Reports that wait, bounded: at a follower until they are confirmed, at the lead for its judge."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple

# -- at a follower


class _Pending(NamedTuple):
    report: Any
    size: int


class PendingReports:
    """The agent's loop adds to it. The thread of links sends, and drops confirmed reports.

    Of too many the oldest go first.
    """

    def __init__(self, most_bytes: int, most_reports: int) -> None:
        self._most_bytes, self._most_reports = most_bytes, most_reports
        self._reports: deque[_Pending] = deque()
        self._bytes = self._number = 0
        self._lock = threading.Lock()
        self.dropped = 0

    def add(self, report: Any, most_report_bytes: int) -> None:
        """Number a report and keep it; one of more bytes than it may have is dropped at once."""
        size = report.ByteSize()
        with self._lock:
            self._number += 1
            report.number = self._number
            self._reports.append(_Pending(report, size))
            self._bytes += size
            if size > most_report_bytes:
                self._drop(self._reports.pop())
            while self._bytes > self._most_bytes or len(self._reports) > self._most_reports:
                self._drop(self._reports.popleft())

    def _drop(self, each: _Pending) -> None:
        self._bytes -= each.size
        self.dropped += 1

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


# -- at the lead


class _Waiting(NamedTuple):
    order: int
    size: int
    report: Any


class WaitingReports:
    """The thread of links adds to it, and the agent's loop takes all.

    Of too many the node that has most loses its oldest.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._by_node: dict[str, deque[_Waiting]] = {}
        self._bytes_of: dict[str, int] = {}
        self._bytes = self._order = 0
        self._lock = threading.Lock()
        self.dropped = 0

    def add(self, node: str, report: Any, size: int) -> None:
        """*size*: its length in bytes."""
        with self._lock:
            self._order += 1
            self._by_node.setdefault(node, deque()).append(_Waiting(self._order, size, report))
            self._count(node, size)
            while self._bytes > self._most_bytes:
                largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
                self._count(largest, -self._by_node[largest].popleft().size)
                self.dropped += 1

    def _count(self, node: str, size: int) -> None:
        self._bytes += size
        self._bytes_of[node] = self._bytes_of.get(node, 0) + size

    def take(self) -> list[tuple[str, Any]]:
        """All, as they came; they no longer wait."""
        with self._lock:
            taken, self._by_node = self._by_node, {}
            self._bytes_of, self._bytes = {}, 0
        found = [(each, node) for node, waiting in taken.items() for each in waiting]
        return [(node, each.report) for each, node in sorted(found, key=lambda one: one[0].order)]
