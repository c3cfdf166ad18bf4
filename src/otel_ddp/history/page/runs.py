"""Which runs a folder holds: the files of each, of all its nodes, and what the list shows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp.history import directory
from otel_ddp.history.page.exchange import Refused
from otel_ddp.history.reader import History, Unreadable, is_silent, worst_state
from otel_ddp.history.whole_run import WholeRun
from otel_ddp.vocabulary.words import HARMLESS_VERDICTS, VERDICTS

_MOST_SUMMARY = 60
_MOST_SENTENCES = 5

RunKey = tuple[str, str]
"""Group and name."""


class _Known(NamedTuple):
    """A file as it was at one time."""

    signature: tuple[int, ...]
    row: dict[str, Any] | None
    fault: str


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
            known = self._read()
        except Unreadable as why:
            return [], [str(why)]
        of_run: dict[RunKey, list[dict[str, Any]]] = {}
        for each in known.values():
            if each.row is not None:
                of_run.setdefault((each.row["group"], each.row["run"]), []).append(each.row)
        runs = [_merged(parts) for parts in of_run.values()]
        faults = sorted(each.fault for each in known.values() if each.fault)
        return sorted(runs, key=lambda run: -run["began_ns"]), faults

    @contextlib.contextmanager
    def opened(self, group: str | None, run: str) -> Iterator[WholeRun]:
        """The histories of a run, of each node one; of the newest group where none is named."""
        found = [
            (each.row, path)
            for path, each in self._read().items()
            if each.row is not None and each.row["run"] == run
        ]
        if group is None and found:
            group = max(found, key=lambda one: one[0]["began_ns"])[0]["group"]
        paths = [path for row, path in found if row["group"] == group]
        if not paths:
            raise Refused(
                404,
                f"There is no history of run {run!r}. It begins with the first second of a run; "
                "OTEL_DDP_HISTORY_BYTES=0 keeps none.",
            )
        with contextlib.ExitStack() as opened:
            histories = [opened.enter_context(History(path)) for path in sorted(paths)]
            with WholeRun(histories) as whole_run:
                yield whole_run

    def _read(self) -> dict[Path, _Known]:
        if self._ours and (why := directory.why_not_ours(self.folder)):
            raise Unreadable(f"no history is read: {why}")
        with self._lock:
            known = {}
            for path in directory.histories(self.folder):
                signature, before = _signature(path), self._known.get(path)
                if before is not None and before.signature == signature:
                    known[path] = before
                    continue
                try:
                    with History(path) as history:
                        known[path] = _Known(signature, _row(history), "")
                except Unreadable as why:
                    known[path] = _Known(signature, None, str(why))
            self._known = known
            return known


def _signature(path: Path) -> tuple[int, ...]:
    found: list[int] = []
    for each in (path, path.with_name(f"{path.name}-wal")):
        with contextlib.suppress(OSError):
            status = each.stat()
            found += (status.st_mtime_ns, status.st_size)
    return tuple(found)


def _row(history: History) -> dict[str, Any]:
    about, verdicts = history.about, history.verdicts()
    texts = mapping(about.get("texts"))
    ranks = history.ranks
    steps = [each.get("step") for each in ranks.values()]
    return {
        "group": str(about.get("group") or ""),
        "run": str(about.get("run") or history.path.stem),
        "job_type": sorted({str(each.get("job_type") or "") for each in ranks.values()}),
        "project": str(about.get("project") or ""),
        "nodes": [str(about.get("node") or "")],
        "ranks": list(ranks),
        "local_ranks": sorted({str(each.get("local_rank")) for each in ranks.values()}),
        "tags": texts.get("tags"),
        "name": texts.get("name"),
        "script": mapping(about.get("environment")).get("script"),
        "state": history.state,
        "step": max((step for step in steps if isinstance(step, int)), default=None),
        "began_ns": whole(about.get("began_ns")),
        "seen_ns": whole(about.get("seen_ns")),
        "summary": listed(about.get("summary"))[:_MOST_SUMMARY],
        "verdicts": [_told(each) for each in worst_first(verdicts)[:_MOST_SENTENCES]],
    }


def _told(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """What a list needs of it."""
    keys = ("kind", "who", "phase", "sentence", "since_ns", "until_ns")
    lost_s = mapping(verdict.get("evidence")).get("lost_s")
    return {**{key: verdict.get(key) for key in keys}, "evidence": {"lost_s": lost_s}}


def _merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """One run of several nodes."""

    def all_of(key: str) -> list[Any]:
        return [one for each in parts for one in each[key]]

    state = worst_state(each["state"] for each in parts)
    seen_ns = max(each["seen_ns"] for each in parts)
    steps = (each["step"] for each in parts if each["step"] is not None)
    return {
        **min(parts, key=lambda each: each["ranks"] or ["~"]),
        **{key: all_of(key) for key in ("nodes", "ranks")},
        **{key: sorted({*all_of(key)}) for key in ("job_type", "local_ranks")},
        # Only the first node has seen rank 0, which tells it.
        "script": next((each["script"] for each in parts if each["script"]), None),
        "state": state,
        "silent": is_silent(state, seen_ns),
        "step": max(steps, default=None),
        "began_ns": min(filter(None, (each["began_ns"] for each in parts)), default=0),
        "seen_ns": seen_ns,
        "summary": all_of("summary")[:_MOST_SUMMARY],
        "verdicts": worst_first(all_of("verdicts")),
    }


def worst_first(verdicts: Iterable[Any]) -> list[dict[str, Any]]:
    """Verdicts, those that go on before those that are over; harmless ones come last."""
    found = [dict(each) for each in verdicts if isinstance(each, Mapping)]
    return sorted(found, key=_harm)


def is_harmless(verdict: Mapping[str, Any]) -> bool:
    """Whether nothing is wrong."""
    return verdict.get("kind") in HARMLESS_VERDICTS


def _harm(verdict: Mapping[str, Any]) -> tuple[bool, bool, int, float, int]:
    kind, lost_s = verdict.get("kind"), mapping(verdict.get("evidence")).get("lost_s")
    return (
        is_harmless(verdict),
        verdict.get("until_ns") is not None,
        VERDICTS.index(kind) if kind in VERDICTS else len(VERDICTS),
        -lost_s if isinstance(lost_s, (int, float)) else 0.0,
        -whole(verdict.get("since_ns")),
    )


def mapping(found: Any) -> Mapping[str, Any]:
    """Files come from elsewhere: what should be a mapping may be anything."""
    return found if isinstance(found, Mapping) else {}


def listed(found: Any) -> list[Any]:
    return found if isinstance(found, list) else []


def whole(found: Any) -> int:
    return found if isinstance(found, int) else 0
