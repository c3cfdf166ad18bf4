"""What runs on this node, read from the journals and the agent's file: needs no agent alive."""

from __future__ import annotations

import json
import time
from typing import Any

from otel_ddp import catalog
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import JournalReader, Unreadable

_STATES = {code: word for word, code in catalog.STATES.items()}
_PHASES = {code: word for word, code in catalog.PHASES.items()}
# An agent writes its file every few seconds.
_SILENT_S = 20.0
_OVER = ("finished", "failed", "killed")
ENDED = tuple(catalog.STATES[word] for word in _OVER)


def survey(places: list[Place]) -> dict[str, Any]:
    """Everything that `otel-ddp status` says, as JSON."""
    agents: list[dict[str, Any]] = []
    processes: list[dict[str, Any]] = []
    unreadable: list[str] = []
    verdicts: list[dict[str, Any]] = []
    for place in places:
        agent = _agent(place)
        verdicts += agent.pop("verdicts")
        if agent["alive"] or agent.get("pid"):
            agents.append(agent)
        nodes = agent.pop("nodes")
        # Their journals are gone, or about to go; only the agent still knows of them.
        ended = agent.pop("ended")
        processes += ended
        known = {each.get("journal") for each in ended}
        for path in place.journals():
            if path.name in known:
                continue
            try:
                reader = JournalReader(path)
            except Unreadable as why:
                unreadable.append(str(why))
                continue
            try:
                described = _process(reader)
            finally:
                reader.close()
            described["node"] = nodes.get(path.name) or described["node"]
            processes.append(described)
    # The agent goes on about a run that is over: its ranks are gone, so one or none is left.
    going = [each.get("run") for each in processes if each.get("state") not in _OVER]
    for agent in agents:
        said = agent["insufficient"]
        agent["insufficient"] = {run: why for run, why in said.items() if run in going}
    processes.sort(key=lambda each: (each["started_ns"], str(each["node"]), each["rank"] or 0))
    return {
        "agents": agents,
        "processes": processes,
        "verdicts": verdicts,
        "unreadable": unreadable,
    }


def _agent(place: Place) -> dict[str, Any]:
    try:
        said = json.loads(place.agent_file.read_text())
        silent_s = time.time() - place.agent_file.stat().st_mtime
    except (OSError, ValueError, RecursionError):
        said, silent_s = {}, 0.0
    said = said if isinstance(said, dict) else {}
    pid = place.agent_pid()
    alive = pid is not None
    if alive and not said:
        said = {"pid": pid or None, "starting": True}
    if alive and silent_s > _SILENT_S:
        said["remark"] = f"the agent has not moved for {silent_s:.0f} s: it is stopped, or hangs"
    nodes, ended, verdicts = said.get("nodes"), said.get("ended"), said.get("verdicts")
    if not isinstance(verdicts, list) or not alive:
        verdicts = []  # nobody says any more whether they still hold
    insufficient = said.get("insufficient")
    if not isinstance(insufficient, dict) or not alive:
        insufficient = {}
    return {
        **said,
        "alive": alive,
        "directory": str(place.directory),
        "nodes": nodes if isinstance(nodes, dict) else {},
        "ended": [each for each in ended if _whole(each)] if isinstance(ended, list) else [],
        "insufficient": insufficient,
        "verdicts": [each for each in verdicts if isinstance(each, dict)],
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
    state = judge(None if progress is None else progress.state, alive)
    seen_ns = time.time_ns() if alive else 0
    return describe(reader, state, last_step, seen_ns)


def judge(said: int | None, alive: bool) -> int:
    """The state of a process: what it said last, or killed if it went without a word."""
    state = catalog.STATES["starting"] if said is None else said
    if state not in _STATES:
        state = catalog.STATES["running"]
    if state not in ENDED and not alive:
        return catalog.STATES["killed"]
    return state


def describe(
    reader: JournalReader, state: int, last_step: int | None, seen_alive_ns: int
) -> dict[str, Any]:
    """One process in words."""
    who = reader.identity
    progress = reader.progress()
    phase, since_ns, steps = "other", reader.created_ns, [last_step]
    if progress is not None:
        phase = _PHASES.get(progress.phase_code, "other")
        # A name is of a phase without a code; inside of it there may be others.
        name = reader.names.get(progress.phase_name)
        if phase == "other" and name is not None:
            phase = name.text
        since_ns = reader.created_ns + progress.phase_after_ns
        steps.append(progress.step)
    return {
        "run": who.get("run"),
        "group": who.get("group"),
        "job_type": who.get("job_type"),
        "node": who.get("node") or who.get("host"),
        "rank": who.get("global_rank"),
        "local_rank": who.get("local_rank"),
        "world_size": who.get("world_size"),
        "node_rank": who.get("node_rank"),
        "launcher": who.get("launcher"),
        "strategy": who.get("strategy"),
        "exported": bool(who.get("exported")),
        "settled": bool(who.get("settled")),
        "pid": reader.pid,
        "state": _STATES.get(state, "running"),
        "reason": reader.reason(),
        "step": max((step for step in steps if step is not None), default=None),
        "phase": phase,
        "phase_since_ns": since_ns,
        # Of a process that is gone: when it was last seen, if anybody looked.
        "seen_alive_ns": seen_alive_ns or None,
        "started_ns": reader.created_ns,
        "lost": reader.lost,
        "journal": reader.path.name,
    }
