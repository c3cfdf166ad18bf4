"""What runs on this node, read from the journals and the agent's file: needs no agent alive."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from otel_ddp import catalog
from otel_ddp.agent.reading import workers
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import JournalReader, Unreadable

_STATES = {code: word for word, code in catalog.STATES.items()}
_PHASES = {code: word for word, code in catalog.PHASES.items()}
# An agent writes its file every few seconds.
_SILENT_S = 20.0
_OVER = ("finished", "failed", "killed")
ENDED = tuple(catalog.STATES[word] for word in _OVER)
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
    going = [_run(each) for each in processes if each.get("state") not in _OVER]
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
    return process["state"] not in _OVER and now_ns - process["started_ns"] > _LONG_NS


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
    state = judge(None if progress is None else progress.state, alive)
    if state == catalog.STATES["killed"]:
        lives = os.path.exists(f"/proc/{workers.parent(reader)}")
        if workers.was_ended(reader, workers.End(parent_lives=lives)):
            state = catalog.STATES["finished"]
    seen_ns = time.time_ns() if alive else 0
    return {**describe(reader, state, last_step, seen_ns), **prose(reader)}


def judge(said: int | None, alive: bool) -> int:
    """The state of a process: what it said last, or killed if it went without a word."""
    state = catalog.STATES["starting"] if said is None else said
    if state not in _STATES:
        state = catalog.STATES["running"]
    if state not in ENDED and not alive:
        return catalog.STATES["killed"]
    return state


class World(NamedTuple):
    """What a process says of how many ranks train with it."""

    size: int
    trains: bool
    """It has made a step, or a launcher has started it again: not so most evaluators and actors."""


def training_world(living: Iterable[World], last: World) -> int:
    """How many ranks of a run train together, by its living processes, and as it was *last*.

    What is left, or comes, after the training has ended does not become the training: it has to
    train, or to be several where no process was ever heard to train.
    """
    living = list(living)
    if trains := [each.size for each in living if each.trains]:
        return max(trains)
    largest = max((each.size for each in living), default=0)
    if not last.size or (largest > 1 and not last.trains):
        return largest
    return last.size


def prose(reader: JournalReader) -> dict[str, Any]:
    """What may be long of what is said of a process."""
    return {"description": reader.identity.get("description"), "config": reader.config}


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
        "project": who.get("project"),
        "name": who.get("name"),
        "tags": who.get("tags"),
        "node": who.get("node") or who.get("host"),
        "host": who.get("host"),
        "rank": who.get("global_rank"),
        "local_rank": who.get("local_rank"),
        "world_size": who.get("world_size"),
        "node_rank": who.get("node_rank"),
        "trains": bool(who.get("restarts")) or workers.made_steps(reader),
        "proxy": workers.is_proxy(reader),
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
