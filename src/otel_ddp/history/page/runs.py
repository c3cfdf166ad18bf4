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
from otel_ddp.history.goodput import goodput_of
from otel_ddp.history.newest_attempt import (
    OfNode,
    are_told_by_others,
    first_rank,
    is_silent,
    newest_attempt,
    of_node,
)
from otel_ddp.history.page.exchange import Refused
from otel_ddp.history.reader import History, Unreadable
from otel_ddp.history.report import cost_words
from otel_ddp.history.whole_run import WholeRun, merged
from otel_ddp.journal.survey import Survey
from otel_ddp.journal.survey import of_run as labelled
from otel_ddp.vocabulary.words import (
    HARMLESS_VERDICTS,
    TIME_CAUSES,
    TIME_COLOURS,
    VERDICTS,
)

_MOST_SUMMARY, _MOST_SUMMARY_IN_LIST = 200, 60
_MOST_SENTENCES = 5
_RANK = (
    *("group", "run", "job_type", "node", "rank", "local_rank", "world_size", "pid", "state"),
    *("step", "phase", "phase_since_ns", "started_ns", "seen_alive_ns", "reason", "host"),
    *("launcher", "strategy", "lost", "settled", "journal", "measuring"),
)


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
    about, node = history.about, of_node(history.about, history.ranks)
    texts, environment = (plain.mapping(about.get(key)) for key in ("texts", "environment"))
    verdicts = _worst_first(_of_attempt(history.verdicts(), node.began_ns))
    return {
        "group": str(about.get("group") or ""),
        "run": str(about.get("run") or history.path.stem),
        "of_node": node,
        "project": str(about.get("project") or ""),
        "world_size": environment.get("world_size"),
        "tags": texts.get("tags"),
        "name": texts.get("name"),
        "script": environment.get("script"),
        "began_ns": plain.whole(about.get("began_ns")) or 0,
        "summary": plain.list_of(dict, about.get("summary"))[:_MOST_SUMMARY_IN_LIST],
        "verdicts": [_told(each) for each in verdicts[:_MOST_SENTENCES]],
    }


def _told(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """What a list needs of it."""
    keys = ("kind", "who", "phase", "sentence", "since_ns", "until_ns")
    lost_s = plain.mapping(verdict.get("evidence")).get("lost_s")
    return {**{key: verdict.get(key) for key in keys}, "evidence": {"lost_s": lost_s}}


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One run of several nodes."""
    twice = are_told_by_others([each["of_node"] for each in parts])
    parts = [each for each, more in zip(parts, twice, strict=True) if not more]
    newest = newest_attempt([each["of_node"] for each in parts])
    parts = sorted(parts, key=lambda each: first_rank(newest, each["of_node"]))
    ranks, first = newest.ranks.values(), {**parts[0]}
    # Describes each rank: too much for a list.
    del first["of_node"]
    seen_ns = max(each["of_node"].seen_ns for each in parts)
    worlds = (each.get("world_size") for each in (first, *ranks))
    steps = [plain.whole(each.get("step")) for each in ranks]

    def all_of(key: str) -> list[Any]:
        return [one for each in parts for one in each[key]]

    nodes = [each["of_node"].node for each in parts]
    others = [node for each in parts for node in each["of_node"].others]

    def labels(key: str) -> list[str]:
        return sorted({str(each.get(key) or "") for each in ranks})

    return {
        **first,
        "nodes": [*dict.fromkeys([*nodes, *others])],
        "ranks": [*newest.ranks],
        "job_type": labels("job_type"),
        "local_ranks": labels("local_rank"),
        "world_size": next(filter(None, worlds), None),
        # Only the first node has seen rank 0, which tells it.
        "script": next((each["script"] for each in parts if each["script"]), None),
        "state": newest.state,
        "silent": is_silent(newest.state, seen_ns),
        "step": max((step for step in steps if step is not None), default=None),
        "began_ns": min(filter(None, (each["began_ns"] for each in parts)), default=0),
        "seen_ns": seen_ns,
        "summary": merged(all_of("summary"))[:_MOST_SUMMARY_IN_LIST],
        "verdicts": _worst_first(_of_attempt(all_of("verdicts"), newest.began_ns)),
    }


def _worst_first(verdicts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Verdicts, those that go on before those that are over; harmless ones come last."""
    return sorted(verdicts, key=_harm)


def _of_attempt(verdicts: Iterable[dict[str, Any]], began_ns: int) -> list[dict[str, Any]]:
    """Without those that a restart has ended: why earlier attempts ended is told with these."""
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


def head(run: WholeRun, live: Survey) -> dict[str, Any]:
    """State, ranks, what its time went to, verdicts, gaps, configuration."""
    about, of_run, now_ns = run.about, (run.group, run.name), time.time_ns()
    seen_ns = plain.whole(about.get("seen_ns")) or 0
    job_type = str(about.get("job_type") or "")
    living = {
        each.rank_key(job_type): each.to_json() for each in live.processes if each.of_run == of_run
    }
    newest = newest_attempt([*run.of_nodes, OfNode(living, now_ns)])
    told = verdicts(run.verdicts())
    return {
        "now_ns": now_ns,
        "group": run.group,
        "run": run.name,
        "project": str(about.get("project") or ""),
        "nodes": run.nodes,
        "state": newest.state,
        "silent": is_silent(newest.state, seen_ns),
        "began_ns": plain.whole(about.get("began_ns")) or 0,
        "seen_ns": seen_ns,
        "ranks": [shown(each) | {"rank": rank} for rank, each in newest.ranks.items()],
        "time": _time_spent(run),
        "verdicts": told,
        "worst": next(
            (e for e in _worst_first(_of_attempt(told, newest.began_ns)) if not e["harmless"]), None
        ),
        "gaps": [
            {"node": str(history.about.get("node") or "?"), **gap}
            for history in run.histories
            for gap in plain.list_of(dict, history.about.get("gaps"))
        ],
        "summary": run.summary[:_MOST_SUMMARY],
        "agent": bool(live.agents),
        "not_kept_since_ns": live.agent.get("history", {}).get("since_ns") or 0,
        **{key: plain.mapping(about.get(key)) for key in ("config", "texts", "environment")},
        "telemetry": cost_words(run.cost),
        "look": run.look,
        "insufficient": [
            str(each.get("why")) for each in live.insufficient if labelled(each) == of_run
        ],
    }


def _time_spent(run: WholeRun) -> dict[str, Any] | None:
    """What each cause has taken, and the attempts; None where nothing was counted."""
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


def shown(process: Mapping[str, Any]) -> dict[str, Any]:
    """A process, as the page needs it."""
    return {key: process[key] for key in _RANK if key in process}


def verdicts(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """With what colours them."""
    return [{**each, "harmless": each.get("kind") in HARMLESS_VERDICTS} for each in found]
