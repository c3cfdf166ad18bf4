"""What runs on this node, read from the journals and the agent's file: needs no agent alive."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from otel_ddp import catalog
from otel_ddp.agent.reading import workers
from otel_ddp.agent.reading.process_status import OVER, describe, long_texts, state_of
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import JournalReader, Unreadable

# An agent writes its file every few seconds.
_SILENT_S = 20.0
# By then an agent is up, and who took the place of another has it for itself.
_LONG_NS = 10_000_000_000
_LAST_BYTES = 4096


def survey(places: list[Place], now_ns: int | None = None) -> dict[str, Any]:
    """Everything that `otel-ddp status` says, as JSON."""
    now_ns = time.time_ns() if now_ns is None else now_ns
    agents: list[dict[str, Any]] = []
    processes: list[dict[str, Any]] = []
    unreadable: list[str] = []
    verdicts: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    unserved: list[dict[str, Any]] = []
    doubled: list[dict[str, Any]] = []
    for place in places:
        agent = _agent(place)
        alive = agent["alive"]
        verdicts += agent.pop("verdicts")
        notes += agent.pop("notes")
        if alive or agent.get("pid"):
            agents.append(agent)
        nodes = agent.pop("nodes")
        # Their journals are gone, or about to go; only the agent still knows of them.
        ended = agent.pop("ended")
        processes += ended
        known = {each.get("journal") for each in ended}
        here = list(_processes(place, known, unreadable))
        for each in here:
            each["node"] = nodes.get(each["journal"]) or each["node"]
        processes += here
        long_here = [each for each in here if _long_here(each, now_ns)]
        doubled += _doubled(long_here)
        if long_here and not alive:
            where = {"directory": str(place.directory), "agent_log": _last_line(place)}
            unserved.append({**where, "processes": len(long_here)})
    # The agent goes on about a run that is over: its ranks are gone, so one or none is left.
    going = [_run(each) for each in processes if each.get("state") not in OVER]
    for agent in agents:
        agent["insufficient"] = [each for each in agent["insufficient"] if _run(each) in going]
    processes.sort(key=lambda each: (each["started_ns"], str(each["node"]), each["rank"] or 0))
    return {
        "agents": agents,
        "processes": processes,
        "verdicts": verdicts,
        "notes": notes,
        "unreadable": unreadable,
        "unserved": unserved,
        "doubled": doubled,
    }


def _run(said: Mapping[str, Any]) -> tuple[str, str]:
    """Which run it is: a name alone may be in several groups."""
    return str(said.get("group") or ""), str(said.get("run") or "")


def _processes(
    place: Place, known: Collection[Any], unreadable: list[str]
) -> Iterator[dict[str, Any]]:
    """Those of which there are journals, but for the ones that are known."""
    for path in place.journals():
        if path.name in known:
            continue
        try:
            reader = JournalReader(path)
        except Unreadable as why:
            unreadable.append(str(why))
            continue
        try:
            yield _process(reader)
        finally:
            reader.close()


def _long_here(process: Mapping[str, Any], now_ns: int) -> bool:
    return process["state"] not in OVER and now_ns - process["started_ns"] > _LONG_NS


def _last_line(place: Place) -> str:
    """The last thing that an agent of this place said, or that was said of it."""
    try:
        with place.agent_log.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - _LAST_BYTES))
            lines = log.read(_LAST_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next(filter(None, map(str.strip, reversed(lines))), "")


def _doubled(living: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The ranks that several processes say they are: only one of them is seen in the metrics."""
    seats: dict[str, list[dict[str, Any]]] = {}
    for each in living:
        if each["settled"] and each["rank"] is not None:
            seat = repr([each[name] for name in ("run", "group", "job_type", "node", "rank")])
            seats.setdefault(seat, []).append(each)
    for one, *others in seats.values():
        if others:
            pids = [each["pid"] for each in (one, *others)]
            yield {"group": one["group"], "run": one["run"], "rank": one["rank"], "pids": pids}


def _agent(place: Place) -> dict[str, Any]:
    try:
        said = json.loads(place.agent_file.read_text())
        silent_s = time.time() - place.agent_file.stat().st_mtime
    except (OSError, ValueError, RecursionError):
        said, silent_s = {}, 0.0
    said = said if isinstance(said, dict) else {}
    # Told by the kernel, as it is numbered here; its own word is of where it runs.
    pid = place.agent_pid()
    alive = pid is not None
    if alive and not said:
        said = {"pid": pid or None, "starting": True}
    if alive and silent_s > _SILENT_S:
        said["remark"] = f"the agent has not moved for {silent_s:.0f} s: it is stopped, or hangs"
    nodes, ended, verdicts = said.get("nodes"), said.get("ended"), said.get("verdicts")
    if not isinstance(verdicts, list) or not alive:
        verdicts = []  # nobody says any more whether they still hold
    notes = said.get("notes")
    if not isinstance(notes, list) or not alive:
        notes = []
    insufficient = said.get("insufficient")
    if not isinstance(insufficient, list) or not alive:
        insufficient = []
    return {
        **said,
        "alive": alive,
        "pid_here": pid,
        "directory": str(place.directory),
        "nodes": nodes if isinstance(nodes, dict) else {},
        "ended": [each for each in ended if _whole(each)] if isinstance(ended, list) else [],
        "insufficient": [each for each in insufficient if isinstance(each, dict)],
        "verdicts": [each for each in verdicts if isinstance(each, dict)],
        "notes": [each for each in notes if isinstance(each, dict)],
    }


def _whole(described: Any) -> bool:
    """Whether this is what `describe` made, maybe of a version with more to say."""
    if not isinstance(described, dict):
        return False
    rank = described.get("rank")
    return isinstance(described.get("started_ns"), int) and (rank is None or isinstance(rank, int))


def _process(reader: JournalReader) -> dict[str, Any]:
    alive = reader.writer_lives()
    reader.refresh()
    last_step = max((r.step for r in reader.latest() if r.step is not None), default=None)
    progress = reader.progress()
    state = state_of(None if progress is None else progress.state, alive)
    if state == catalog.STATES["killed"]:
        lives = os.path.exists(f"/proc/{workers.parent(reader)}")
        if workers.was_ended(reader, workers.End(parent_lives=lives)):
            state = catalog.STATES["finished"]
    seen_ns = time.time_ns() if alive else 0
    return {**describe(reader, state, last_step, seen_ns), **long_texts(reader)}
