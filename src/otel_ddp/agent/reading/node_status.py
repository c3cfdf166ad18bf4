"""Surveys a node for `otel-ddp status`: reads journals and the agent's file, without an agent."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from typing import Any

from otel_ddp.agent.reading import finished_workers
from otel_ddp.agent.reading.process_status import describe, long_texts, state_of
from otel_ddp.errors import foreign_json
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import JournalReader, Unreadable
from otel_ddp.words import ENDED_STATES, STATES

# An agent writes its file every few seconds.
_STOPPED_S = 20.0
# By then an agent has started, and a process that replaced another one is alone.
_LONG_HERE_NS = 10_000_000_000


def survey(places: list[Place], now_ns: int | None = None) -> dict[str, Any]:
    """Everything that `otel-ddp status` shows, as JSON."""
    now_ns = time.time_ns() if now_ns is None else now_ns
    agents: list[dict[str, Any]] = []
    processes: list[dict[str, Any]] = []
    unreadable: list[str] = []
    verdicts: list[dict[str, Any]] = []
    past: list[dict[str, Any]] = []
    notes: list[dict[str, Any]] = []
    unserved: list[dict[str, Any]] = []
    doubled: list[dict[str, Any]] = []
    for place in places:
        # The journals first: the agent describes a process before it deletes its journal.
        found, faults = _processes(place)
        agent = _agent(place)
        alive = agent["alive"]
        verdicts += agent.pop("verdicts")
        past += agent.pop("past")
        notes += agent.pop("notes")
        if alive or agent.get("pid"):
            agents.append(agent)
        nodes = agent.pop("nodes")
        # Their journals are deleted, or soon will be: only the agent still knows them.
        ended = agent.pop("ended")
        processes += ended
        known = {each.get("journal") for each in ended}
        here = [each for each in found if each["journal"] not in known]
        unreadable += [why for name, why in faults.items() if name not in known]
        for each in here:
            each["node"] = nodes.get(each["journal"]) or each["node"]
        processes += here
        long_here = [each for each in here if _long_here(each, now_ns)]
        doubled += _doubled(long_here)
        if long_here and not alive:
            where = {"directory": str(place.directory), "agent_log": place.last_line()}
            unserved.append({**where, "processes": len(long_here)})
    # The agent still lists a run that is over, because one rank or none is left of it.
    going = [_run(each) for each in processes if each.get("state") not in ENDED_STATES]
    for agent in agents:
        agent["insufficient"] = [each for each in agent["insufficient"] if _run(each) in going]
    processes.sort(key=lambda each: (each["started_ns"], str(each["node"]), each["rank"] or 0))
    return {
        "agents": agents,
        "processes": processes,
        "verdicts": verdicts,
        "past": past,
        "notes": notes,
        "unreadable": unreadable,
        "unserved": unserved,
        "doubled": doubled,
    }


def _run(described: Mapping[str, Any]) -> tuple[str, str]:
    """Group and name of a run: several groups may have runs of one name."""
    return str(described.get("group") or ""), str(described.get("run") or "")


def _processes(place: Place) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The processes with a journal; and by its name, why another journal cannot be read."""
    found: list[dict[str, Any]] = []
    faults: dict[str, str] = {}
    for path in place.journals():
        try:
            reader = JournalReader(path)
        except Unreadable as why:
            # It may have been deleted since it was listed.
            if path.exists():
                faults[path.name] = str(why)
            continue
        try:
            found.append(_process(reader))
        finally:
            reader.close()
    return found, faults


def _long_here(process: Mapping[str, Any], now_ns: int) -> bool:
    return process["state"] not in ENDED_STATES and now_ns - process["started_ns"] > _LONG_HERE_NS


def _doubled(living: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The ranks that several processes claim to be: the metrics show only one of these."""
    by_rank: dict[str, list[dict[str, Any]]] = {}
    for each in living:
        if each["settled"] and each["rank"] is not None:
            key = repr([each[name] for name in ("run", "group", "job_type", "node", "rank")])
            by_rank.setdefault(key, []).append(each)
    for one, *others in by_rank.values():
        if others:
            pids = [each["pid"] for each in (one, *others)]
            yield {"group": one["group"], "run": one["run"], "rank": one["rank"], "pids": pids}


def _agent(place: Place) -> dict[str, Any]:
    """The agent's file, and whether the agent lives; each list complete and well-formed."""
    try:
        about = foreign_json.parse(place.agent_file.read_text())
        silent_s = time.time() - place.agent_file.stat().st_mtime
    except (OSError, ValueError):
        about, silent_s = {}, 0.0
    about = about if isinstance(about, dict) else {}
    # From the kernel, as numbered here; the agent's own number is of its PID namespace.
    pid = place.agent_pid()
    alive = pid is not None
    if alive and not about:
        about = {"pid": pid or None, "starting": True}
    if alive and silent_s > _STOPPED_S:
        about["remark"] = f"the agent has not moved for {silent_s:.0f} s: it is stopped, or hangs"

    def dicts(key: str) -> list[dict[str, Any]]:
        found = about.get(key)
        return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []

    nodes = about.get("nodes")
    return {
        **about,
        "alive": alive,
        "pid_here": pid,
        "directory": str(place.directory),
        "nodes": nodes if isinstance(nodes, dict) else {},
        "ended": [each for each in dicts("ended") if _is_description(each)],
        "past": dicts("past"),
        # Without an agent it is unknown whether these are still true.
        "insufficient": dicts("insufficient") if alive else [],
        "verdicts": dicts("verdicts") if alive else [],
        "notes": dicts("notes") if alive else [],
    }


def _is_description(described: dict[str, Any]) -> bool:
    """Whether this was made by `describe`, maybe of a later version."""
    rank = described.get("rank")
    return isinstance(described.get("started_ns"), int) and (rank is None or isinstance(rank, int))


def _process(reader: JournalReader) -> dict[str, Any]:
    alive = reader.writer_is_alive()
    reader.read_definitions()
    last_step = max((r.step for r in reader.latest() if r.step is not None), default=None)
    progress = reader.progress()
    state = state_of(None if progress is None else progress.state, alive)
    if state == STATES["killed"]:
        lives = os.path.exists(f"/proc/{finished_workers.parent(reader)}")
        if finished_workers.ended_by_parent(reader, finished_workers.End(parent_lives=lives)):
            state = STATES["finished"]
    seen_ns = time.time_ns() if alive else 0
    return {**describe(reader, state, last_step, seen_ns), **long_texts(reader)}
