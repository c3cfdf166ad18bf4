"""The profiles of a run: what takes longer on the suspect, and the traces to download."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from otel_ddp import files
from otel_ddp.history import profiles
from otel_ddp.history.page.exchange import PACKED, Answer, Question, Refused

_MOST, _MOST_OPERATORS = 20, 15
# The agent holds it in memory while it is sent.
_LARGEST_TRACE = 32 * 1024 * 1024


def table(group: str, run: str, root: Path | None) -> dict[str, Any]:
    """The latest first."""
    return {
        "profiles": [
            {
                "folder": str(each.folder),
                "asked_ns": each.asked_ns,
                "why": each.why,
                "ranks": each.ranks,
                "traces": [path.name for path in each.traces],
                "operators": [
                    {"name": row.name, "times_s": row.times_s}
                    for row in each.operators(_MOST_OPERATORS)
                ],
            }
            for each in profiles.of_run(group, run, root)[:_MOST]
        ]
    }


def trace(group: str, run: str, question: Question, root: Path | None) -> Answer:
    """One of the files that `table` names."""
    wanted = question.text("folder"), question.text("name")
    for each in profiles.of_run(group, run, root):
        for path in each.traces:
            if (str(each.folder), path.name) == wanted:
                return _sent(path)
    raise Refused(404, f"there is no trace {wanted[1][:200]!r}")


def _sent(path: Path) -> Answer:
    content = None
    with contextlib.suppress(OSError):
        content = files.read(path, _LARGEST_TRACE + 1)
    if content is None:
        raise Refused(404, f"{path} cannot be read")
    if len(content) > _LARGEST_TRACE:
        raise Refused(413, f"the trace is larger than this page sends: copy {path}")
    headers = {
        "Content-Type": PACKED,
        "Content-Disposition": f'attachment; filename="{path.name}"',
        "Cache-Control": "no-store",
    }
    return Answer(200, headers, content)
