"""The data of the page's list of runs, and of the head of one run's page."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import plain
from otel_ddp.history import directory
from otel_ddp.history.goodput import goodput_of
from otel_ddp.history.newest_attempt import Newest, OfNode, is_silent, newest_attempt
from otel_ddp.history.page.http import Refused
from otel_ddp.history.reader import Unreadable
from otel_ddp.history.report import cost_words
from otel_ddp.history.tables import RunKey
from otel_ddp.history.verdicts import shown_first, worst_first
from otel_ddp.history.whole_run import WholeRun, main_values
from otel_ddp.journal.survey import Survey
from otel_ddp.journal.survey import of_run as labelled
from otel_ddp.vocabulary.words import ADVICE, HARMLESS_VERDICTS, TIME_CAUSES

_MOST_SUMMARY, _MOST_SUMMARY_IN_LIST = 200, 60
_MOST_SENTENCES = 5
# Limits for each run in the list: the points of its sparkline, and the settings of its
# configuration.
_CURVE, _MOST_SETTINGS = 40, 60
_RANK = "group run node rank state step phase phase_since_ns seen_alive_ns reason measuring read_ns"


_Signature = tuple[int, ...]


class _File(NamedTuple):
    """Cached data of a history file. It is read again once its signature (size, time) changes."""

    signature: _Signature
    of_run: RunKey = ("", "")
    began_ns: int = 0
    # Why the file cannot be read; empty if it can.
    fault: str = ""


class Runs:
    """The runs of a folder, with a cache of unchanged files. Thread-safe."""

    def __init__(self, folder: Path, ours: bool) -> None:
        """*ours*: True to read the folder only while no other user can write there."""
        self.folder = folder
        self._ours = ours
        self._lock = threading.Lock()
        self._files: dict[Path, _File] = {}
        self._rows: dict[RunKey, tuple[dict[Path, _Signature], dict[str, Any]]] = {}

    def rows(self) -> tuple[list[dict[str, Any]], list[str]]:
        """The rows of the list, newest run first; and the reasons why files could not be read."""
        try:
            files = self._read()
        except Unreadable as why:
            return [], [str(why)]
        faults = [each.fault for each in files.values() if each.fault]
        of_run: dict[RunKey, dict[Path, _Signature]] = {}
        for path, each in files.items():
            if not each.fault:
                of_run.setdefault(each.of_run, {})[path] = each.signature
        with self._lock:
            before, self._rows = self._rows, {}
            for key, parts in of_run.items():
                known = before.get(key)
                try:
                    self._rows[key] = known if known and known[0] == parts else _row(parts)
                except Unreadable as why:
                    faults.append(str(why))
            rows = [row for _, row in self._rows.values()]
        return sorted(rows, key=lambda row: -row["began_ns"]), sorted(faults)

    def opened(self, group: str | None, run: str) -> WholeRun:
        """Open the histories of a run. *group*: None for the newest group that has such a run."""
        found = {
            path: each
            for path, each in self._read().items()
            if not each.fault and each.of_run[1] == run
        }
        if group is None and found:
            group, _ = max(found.values(), key=lambda each: each.began_ns).of_run
        paths = sorted(path for path, each in found.items() if each.of_run[0] == group)
        if not paths:
            why = "It begins a second after the run; OTEL_DDP_HISTORY_BYTES=0 switches it off."
            raise Refused(404, f"There is no history of run {run!r}. {why}")
        return directory.open_run(paths)

    def _read(self) -> dict[Path, _File]:
        if self._ours and (why := directory.why_not_ours(self.folder)):
            raise Unreadable(f"no history is read: {why}")
        with self._lock:
            before, self._files = self._files, {}
            for path in directory.histories(self.folder):
                known, signature = before.get(path), _signature(path)
                is_known = known is not None and known.signature == signature
                self._files[path] = known if known and is_known else _file(path, signature)
            return self._files


def _signature(path: Path) -> _Signature:
    found: list[int] = []
    for each in (path, path.with_name(f"{path.name}-wal")):
        with contextlib.suppress(OSError):
            status = each.stat()
            found += (status.st_mtime_ns, status.st_size)
    return tuple(found)


def _file(path: Path, signature: _Signature) -> _File:
    try:
        with directory.open_run([path]) as run:
            return _File(signature, (run.group, run.name), run.began_ns)
    except Unreadable as why:
        return _File(signature, fault=str(why))


def _row(parts: dict[Path, _Signature]) -> tuple[dict[Path, _Signature], dict[str, Any]]:
    """The row of one run in the list. *parts*: its history files."""
    with directory.open_run(parts) as run:
        verdicts = worst_first(run.verdicts(), run.newest.began_ns)
        summary = run.own_summary[:_MOST_SUMMARY_IN_LIST]
        main, spent = main_values(summary), goodput_of(run)
        ranks, texts = run.ranks.values(), run.section("texts")
        row = {
            **run.head(),
            "ranks": [*run.ranks],
            "world_size": run.world_size,
            "job_type": sorted({str(each.get("job_type") or "") for each in ranks}),
            "local_ranks": sorted({_label(each.get("local_rank")) for each in ranks}),
            "tags": texts.get("tags"),
            "name": texts.get("name"),
            "script": run.section("environment").get("script"),
            "silent": is_silent(run.state, run.seen_ns),
            "step": run.step,
            "summary": summary,
            "main": main,
            "curve": _curve(run, main[0]) if main else [],
            "share": spent and spent["share"],
            "config": dict([*run.section("config").items()][:_MOST_SETTINGS]),
            "verdicts": [*map(_short, verdicts[:_MOST_SENTENCES])],
        }
    return parts, row


def _label(value: Any) -> str:
    return "" if value is None else str(value)


def _curve(run: WholeRun, main: Mapping[str, str]) -> list[float | None]:
    """The course of one logged value as means over neighbouring steps, for a sparkline."""
    buckets = run.values.get((main["name"], main["split"]), [])
    many = math.ceil(len(buckets) / _CURVE)
    parts = [buckets[at : at + many] for at in range(0, len(buckets), many or 1)]
    sums = [(sum(b.total for b in part), sum(b.finite for b in part)) for part in parts]
    return [total / finite if finite else None for total, finite in sums]


def _short(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a verdict that the list of runs shows."""
    keys = ("kind", "who", "phase", "step", "sentence", "since_ns", "until_ns", "evidence")
    return {key: verdict.get(key) for key in keys}


# -- one run


def head(run: WholeRun, live: Survey) -> dict[str, Any]:
    """The head of a run's page: state, time by cause, verdicts, gaps, configuration."""
    of_run, newest = (run.group, run.name), _newest(run, live)
    ranks = newest.ranks.values()
    steps = [step for each in ranks if (step := plain.whole(each.get("step"))) is not None]
    summary = run.summary[:_MOST_SUMMARY]
    # `insufficient` has the reasons why ranks cannot be compared now. A run that is over has none.
    goes_on = any(each.of_run == of_run and not each.ended for each in live.processes)
    shown_verdicts, time_spent = verdicts(run.verdicts()), goodput_of(run)
    return {
        **run.head(),
        "now_ns": time.time_ns(),
        "state": newest.state,
        "silent": is_silent(newest.state, run.seen_ns),
        "ranks": len(ranks),
        "states": Counter(str(each.get("state")) for each in ranks),
        "step": max(steps, default=None),
        "measuring": [
            *(f"not measured: {each}" for each in _words_of(ranks, "not_measured")),
            *_words_of(ranks, "measuring"),
        ],
        "time": time_spent and {**time_spent, "shown": TIME_CAUSES},
        "verdicts": shown_verdicts,
        "first": shown_first(shown_verdicts, newest.began_ns),
        "gaps": [
            {"node": str(history.about.get("node") or "?"), **gap}
            for history in run.histories
            for gap in plain.list_of(dict, history.about.get("gaps"))
        ],
        "summary": summary,
        "main": main_values(summary),
        "agent": bool(live.agents),
        "not_kept_since_ns": live.agent.get("history", {}).get("since_ns") or 0,
        **{key: run.section(key) for key in ("config", "texts", "environment")},
        "telemetry": cost_words(run.cost),
        "look": run.look,
        "insufficient": [
            str(each.get("why"))
            for each in live.insufficient
            if goes_on and labelled(each) == of_run
        ],
    }


def _words_of(ranks: Iterable[Mapping[str, Any]], key: str) -> list[str]:
    """The distinct texts that the processes have under this key."""
    return sorted({str(each[key]) for each in ranks if each.get(key)})


def _newest(run: WholeRun, live: Survey) -> Newest:
    """The newest attempt, including the agent's living processes."""
    living = {
        each.rank_key(run.word("job_type")): each.to_json()
        for each in live.processes
        if each.of_run == (run.group, run.name)
    }
    return newest_attempt([*run.of_nodes, OfNode(living, time.time_ns())])


def ranks(run: WholeRun, live: Survey) -> dict[str, Any]:
    """The processes of the newest attempt. They may be thousands, so `head` does not have them."""
    found = _newest(run, live).ranks.items()
    return {"now_ns": time.time_ns(), "ranks": [shown(e) | {"rank": rank} for rank, e in found]}


def shown(process: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a process that the page shows."""
    return {key: process[key] for key in _RANK.split() if key in process}


def verdicts(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The verdicts with two more keys: `harmless` and `advice`.

    The page colours a verdict by `harmless`. It shows `advice` if the sentence has none, as for a
    past verdict.
    """
    return [
        {
            **each,
            "harmless": each.get("kind") in HARMLESS_VERDICTS,
            "advice": ADVICE.get(str(each.get("phase")), ""),
        }
        for each in found
    ]
