"""The table of events: the latest log lines, exceptions and checkpoints of all nodes of a run."""

from __future__ import annotations

from typing import Any

from otel_ddp.history.page.exchange import Question
from otel_ddp.history.reader import History

_MOST = 500


def table(histories: list[History], question: Question) -> dict[str, Any]:
    """The latest first. `more`: whether there are older ones."""
    most = question.whole("most", 100, 1, _MOST)
    like = question.text("like")[:200]
    before_ns = question.whole("before_ns", 2**62, 0, 2**62)
    found: list[dict[str, Any]] = [
        {
            "time_ns": each.time_ns,
            # A browser's numbers are too short for it.
            "time_exact": str(each.time_ns),
            "step": each.step,
            "rank": each.rank,
            "node": str(history.about.get("node") or ""),
            "name": each.name,
            "severity": each.severity,
            "body": each.body,
            "attributes": each.attributes,
        }
        for history in histories
        for each in history.events(most + 1, before_ns, like)
    ]
    found.sort(key=lambda each: -each["time_ns"])
    return {"events": found[:most], "more": len(found) > most}
