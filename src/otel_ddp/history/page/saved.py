"""The page of one run as one file: what its scripts would ask for lies in it."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Sequence
from typing import Any

from otel_ddp.history import postmortems
from otel_ddp.history.page import answers, head, static_files
from otel_ddp.history.page.exchange import Question, as_json
from otel_ddp.history.postmortems import Postmortem
from otel_ddp.history.profiles import Profile
from otel_ddp.history.whole_run import WholeRun

# Pictures, the points of all lines in one, and the characters of a post-mortem.
_MOST_NAMES, _MOST_POINTS, _LONGEST_TEXT = 60, 8192, 256 * 1024
_MOST_COLUMNS, _FEWEST_COLUMNS = 512, 32
_MOST_FILES, _MOST_OPERATORS = 5, 15


def page(
    run: WholeRun,
    reports: Sequence[Postmortem] = (),
    profiles: Sequence[Profile] = (),
) -> str:
    """HTML."""

    def answer(path: str, **query: Any) -> dict[str, Any]:
        words = {name: [str(value)] for name, value in query.items()}
        return answers.ANSWERS[path](run, Question(path, words))

    names = answer("names")
    node = [each["name"] for each in names["node"]]
    reports = reports[:_MOST_FILES]
    found = {
        "run": head.head(run, None, True),
        "names": {
            "values": names["values"][:_MOST_NAMES],
            "node": names["node"][:_MOST_NAMES],
            "left_out": max(len(names["values"]) - _MOST_NAMES, 0),
        },
        "values": _pictures(run, answer, "values", names["values"], ("value",)),
        "node": _pictures(run, answer, "node", node, ("node", "counter")),
        "steps": answer("steps", columns=_MOST_COLUMNS),
        "events": answer("events", most=200),
        "postmortems": {"postmortems": [each.described() for each in reports]},
        "postmortem": {
            each.path.stem: (postmortems.text([each.path.parent], each.path.stem) or "")[
                :_LONGEST_TEXT
            ]
            for each in reports
        },
        "profiles": {
            "profiles": [each.described(_MOST_OPERATORS) for each in profiles[:_MOST_FILES]]
        },
    }
    return static_files.saved(gzip.compress(as_json(200, found).body, 9, mtime=0))


def _pictures(
    run: WholeRun,
    answer: Callable[..., dict[str, Any]],
    path: str,
    names: Sequence[str],
    kinds: Sequence[str],
) -> dict[str, Any]:
    """The answer on each name. The more lines a picture has, the fewer points has each."""
    found = {}
    for name in names[:_MOST_NAMES]:
        lines = sum(len(each.series(kind, name)) for each in run.histories for kind in kinds)
        columns = max(min(_MOST_COLUMNS, _MOST_POINTS // max(lines, 1)), _FEWEST_COLUMNS)
        found[name] = answer(path, name=name, columns=columns)
    return found
