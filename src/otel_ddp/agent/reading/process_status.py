"""The state of a process and its description for people, from its journal."""

from __future__ import annotations

from typing import Any

from otel_ddp import catalog
from otel_ddp.agent.reading import workers
from otel_ddp.journal.reader import JournalReader

_STATES = {code: word for word, code in catalog.STATES.items()}
_PHASES = {code: word for word, code in catalog.PHASES.items()}
OVER = ("finished", "failed", "killed")
ENDED = tuple(catalog.STATES[word] for word in OVER)


def state_of(said: int | None, alive: bool) -> int:
    """The state of a process: what it said last, or killed if it went without a word."""
    state = catalog.STATES["starting"] if said is None else said
    if state not in _STATES:
        state = catalog.STATES["running"]
    if state not in ENDED and not alive:
        return catalog.STATES["killed"]
    return state


def long_texts(reader: JournalReader) -> dict[str, Any]:
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
