"""What the page shows of a run's time: what each cause has taken, and the attempts."""

from __future__ import annotations

from typing import Any

from otel_ddp.history.goodput import goodput_of
from otel_ddp.history.whole_run import WholeRun
from otel_ddp.vocabulary.words import TIME_CAUSES, TIME_COLOURS


def time_spent(run: WholeRun) -> dict[str, Any] | None:
    """None where nothing was counted."""
    found = goodput_of(run)
    if found is None:
        return None
    return {
        "causes": [
            {
                "name": cause,
                "shown": TIME_CAUSES[cause],
                "colour": TIME_COLOURS[cause],
                "spent_s": spent_s,
                "share": found.share(cause),
            }
            for cause, spent_s in found.seconds.items()
        ],
        "late": sorted(found.late.items(), key=lambda each: -each[1]),
        "rank_s": found.total_s,
        "attempts": found.attempts,
    }
