"""Reports that wait at the lead for its judge, bounded.

What is dropped is asked for again: it is in the journals still.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, NamedTuple


class _Waiting(NamedTuple):
    order: int
    size: int
    report: Any


class WaitingReports:
    """One thread adds to it, and another one takes all.

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
