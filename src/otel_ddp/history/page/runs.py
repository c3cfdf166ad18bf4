"""Which runs a folder holds, as the list shows them; and what stands above one run's pictures."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import plain
from otel_ddp.history import directory
from otel_ddp.history.goodput import Price
from otel_ddp.history.page.exchange import Refused
from otel_ddp.history.page.time_spent import time_spent
from otel_ddp.history.reader import (
    History,
    Unreadable,
    is_silent,
    rank_order,
    state_of_nodes,
)
from otel_ddp.history.report import cost_words
from otel_ddp.history.whole_run import WholeRun
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS, VERDICTS

_MOST_SUMMARY, _MOST_SUMMARY_IN_LIST = 200, 60
_MOST_SENTENCES = 5
# What /metrics tells as well. Reasons of an end hold texts of errors, and sentences may.
_PUBLIC_RANK = (
    *("group", "run", "job_type", "node", "rank", "local_rank", "world_size", "pid", "state"),
    *("step", "phase", "phase_since_ns", "started_ns", "seen_alive_ns"),
)
_PRIVATE_RANK = (
    *_PUBLIC_RANK,
    *("reason", "host", "launcher", "strategy", "lost", "settled", "journal", "measuring"),
)
_PUBLIC_VERDICT = ("kind", "who", "phase", "step", "since_step", "since_ns", "until_ns")
_PRIVATE_VERDICT = (*_PUBLIC_VERDICT, "sentence", "board", "evidence")

Live = Mapping[str, Any]
"""What an agent knows at this moment: its processes, GPUs and verdicts; empty without an agent."""


class _Known(NamedTuple):
    """A file as it was at one time."""

    signature: tuple[int, ...]
    row: dict[str, Any]
    """Empty where it cannot be read."""
    fault: str = ""


class Runs:
    """The runs of a folder. Threads ask; files that have not changed are not read again."""

    def __init__(self, folder: Path, ours: bool) -> None:
        """*ours*: as in App."""
        self.folder = folder
        self._ours = ours
        self._lock = threading.Lock()
        self._known: dict[Path, _Known] = {}

    def rows(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Each run, the newest first; and why other files cannot be read."""
        try:
            known = self._read().values()
        except Unreadable as why:
            return [], [str(why)]
        of_run: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in (each.row for each in known if each.row):
            of_run.setdefault((row["group"], row["run"]), []).append(row)
        found = sorted(map(_merged, of_run.values()), key=lambda run: -run["began_ns"])
        return found, sorted(each.fault for each in known if each.fault)

    @contextlib.contextmanager
    def opened(self, group: str | None, run: str) -> Iterator[WholeRun]:
        """The histories of a run, of each node one; of the newest group where none is named."""
        found = {path: each.row for path, each in self._read().items()}
        found = {path: row for path, row in found.items() if row and row["run"] == run}
        if group is None and found:
            group = max(found.values(), key=lambda row: row["began_ns"])["group"]
        paths = sorted(path for path, row in found.items() if row["group"] == group)
        if not paths:
            raise Refused(
                404,
                f"There is no history of run {run!r}. It begins with the first second of a run; "
                "OTEL_DDP_HISTORY_BYTES=0 keeps none.",
            )
        with contextlib.ExitStack() as opened:
            histories = [opened.enter_context(History(path)) for path in paths]
            yield opened.enter_context(WholeRun(histories))

    def _read(self) -> dict[Path, _Known]:
        if self._ours and (why := directory.why_not_ours(self.folder)):
            raise Unreadable(f"no history is read: {why}")
        with self._lock:
            before, self._known = self._known, {}
            for path in directory.histories(self.folder):
                signature = _signature(path)
                known = before.get(path)
                if known is None or known.signature != signature:
                    try:
                        with History(path) as history:
                            known = _Known(signature, _row(history))
                    except Unreadable as why:
                        known = _Known(signature, {}, str(why))
                self._known[path] = known
            return self._known


def _signature(path: Path) -> tuple[int, ...]:
    found: list[int] = []
    for each in (path, path.with_name(f"{path.name}-wal")):
        with contextlib.suppress(OSError):
            status = each.stat()
            found += (status.st_mtime_ns, status.st_size)
    return tuple(found)


def _row(history: History) -> dict[str, Any]:
    about, ranks = history.about, history.ranks
    texts, environment = (plain.mapping(about.get(key)) for key in ("texts", "environment"))
    worlds = (each.get("world_size") for each in (environment, *ranks.values()))
    steps = [plain.whole(each.get("step")) for each in ranks.values()]
    return {
        "group": str(about.get("group") or ""),
        "run": str(about.get("run") or history.path.stem),
        "job_type": sorted({str(each.get("job_type") or "") for each in ranks.values()}),
        "project": str(about.get("project") or ""),
        "nodes": [str(about.get("node") or "")],
        "ranks": list(ranks),
        "local_ranks": sorted({str(each.get("local_rank")) for each in ranks.values()}),
        "world_size": next(filter(None, worlds), None),
        "tags": texts.get("tags"),
        "name": texts.get("name"),
        "script": environment.get("script"),
        "state": history.state,
        "step": max((step for step in steps if step is not None), default=None),
        "began_ns": plain.whole(about.get("began_ns")) or 0,
        "seen_ns": plain.whole(about.get("seen_ns")) or 0,
        "summary": plain.list_of(dict, about.get("summary"))[:_MOST_SUMMARY_IN_LIST],
        "verdicts": [
            _told(each)
            for each in _worst_first(_of_last_attempt(history.verdicts(), about))[:_MOST_SENTENCES]
        ],
    }


def _told(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """What a list needs of it."""
    keys = ("kind", "who", "phase", "sentence", "since_ns", "until_ns")
    lost_s = plain.mapping(verdict.get("evidence")).get("lost_s")
    return {**{key: verdict.get(key) for key in keys}, "evidence": {"lost_s": lost_s}}


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One run of several nodes."""

    def all_of(key: str) -> list[Any]:
        return [one for each in parts for one in each[key]]

    state = state_of_nodes((each["state"], each["seen_ns"]) for each in parts)
    seen_ns = max(each["seen_ns"] for each in parts)
    return {
        **min(parts, key=lambda each: each["ranks"] or ["~"]),
        **{key: all_of(key) for key in ("nodes", "ranks")},
        **{key: sorted({*all_of(key)}) for key in ("job_type", "local_ranks")},
        # Only the first node has seen rank 0, which tells it.
        "script": next((each["script"] for each in parts if each["script"]), None),
        "state": state,
        "silent": is_silent(state, seen_ns),
        "step": max((e["step"] for e in parts if e["step"] is not None), default=None),
        "began_ns": min(filter(None, (each["began_ns"] for each in parts)), default=0),
        "seen_ns": seen_ns,
        "summary": all_of("summary")[:_MOST_SUMMARY_IN_LIST],
        "verdicts": _worst_first(all_of("verdicts")),
    }


def _worst_first(verdicts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Verdicts, those that go on before those that are over; harmless ones come last."""
    return sorted(verdicts, key=_harm)


def _of_last_attempt(
    verdicts: Iterable[dict[str, Any]], about: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Without those that a restart has ended: why earlier attempts ended is told with these."""
    _, *later = plain.list_of(dict, about.get("attempts")) or [{}]
    began_ns = plain.whole(later[-1].get("began_ns")) or 0 if later else 0
    return [
        each
        for each in verdicts
        if each.get("until_ns") is None or (plain.whole(each.get("since_ns")) or 0) >= began_ns
    ]


def _harm(verdict: Mapping[str, Any]) -> tuple[bool, bool, int, float, int]:
    kind, lost_s = verdict.get("kind"), plain.mapping(verdict.get("evidence")).get("lost_s")
    return (
        kind in HARMLESS_VERDICTS,
        verdict.get("until_ns") is not None,
        VERDICTS.index(kind) if kind in VERDICTS else len(VERDICTS),
        -(plain.number(lost_s) or 0.0),
        -(plain.whole(verdict.get("since_ns")) or 0),
    )


# -- one run


def head(run: WholeRun, live: Live, private: bool, price: Price | None) -> dict[str, Any]:
    """State, ranks, what its time went to, verdicts, gaps, configuration."""
    about, of_run, state = run.about, (run.group, run.name), run.state
    seen_ns = plain.whole(about.get("seen_ns")) or 0
    ranks = {**run.ranks}
    for process in live.get("processes", ()):
        key = process.rank_key(str(about.get("job_type") or ""))
        before = plain.whole(plain.mapping(ranks.get(key)).get("started_ns")) or 0
        if process.of_run == of_run and process.started_ns >= before:
            ranks[key] = process.to_json()
    shown = _PRIVATE_RANK if private else _PUBLIC_RANK
    told = verdicts(run.verdicts(), private)
    found: dict[str, Any] = {
        "now_ns": time.time_ns(),
        "group": run.group,
        "run": run.name,
        "project": str(about.get("project") or ""),
        "nodes": run.nodes,
        "state": state,
        "silent": is_silent(state, seen_ns),
        "began_ns": plain.whole(about.get("began_ns")) or 0,
        "seen_ns": seen_ns,
        "ranks": [
            {key: each[key] for key in shown if key in each} | {"rank": rank}
            for rank, each in sorted(ranks.items(), key=lambda one: rank_order(one[0]))
        ],
        "time": time_spent(run, price, private),
        "verdicts": told,
        "worst": next(
            (e for e in _worst_first(_of_last_attempt(told, about)) if not e["harmless"]), None
        ),
        "gaps": [
            {"node": node, **gap}
            for node, history in zip(run.nodes, run.histories, strict=True)
            for gap in plain.list_of(dict, history.about.get("gaps"))
        ],
        "summary": run.summary[:_MOST_SUMMARY],
        "agent": bool(live),
        "not_kept_since_ns": live.get("history", {}).get("since_ns") or 0,
    }
    if private:
        for key in ("config", "texts", "environment"):
            found[key] = plain.mapping(about.get(key))
        found["telemetry"] = cost_words(run.cost)
        found["look"] = run.look
        found["insufficient"] = [
            str(each.get("why"))
            for each in live.get("insufficient", ())
            if (each.get("group") or "", each.get("run")) == of_run
        ]
    return found


def processes(live: Live, private: bool) -> list[dict[str, Any]]:
    """Each process that the agent knows at this moment."""
    shown = _PRIVATE_RANK if private else _PUBLIC_RANK
    return [{key: getattr(each, key) for key in shown} for each in live.get("processes", ())]


def verdicts(found: Iterable[Any], private: bool) -> list[dict[str, Any]]:
    """Without their sentences for those who may not read them; with what colours them."""
    shown = _PRIVATE_VERDICT if private else _PUBLIC_VERDICT
    return [
        {key: each[key] for key in shown if key in each}
        | {"harmless": each.get("kind") in HARMLESS_VERDICTS}
        for each in found
    ]
