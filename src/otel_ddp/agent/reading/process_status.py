"""The state of a process, and its description for people, by its journal."""

from __future__ import annotations

from typing import Any

from otel_ddp.agent.reading import finished_workers, summary
from otel_ddp.journal.reader import JournalReader
from otel_ddp.words import ENDED_STATES, STATES, phase_word, state_word

ENDED = tuple(STATES[word] for word in ENDED_STATES)


def state_of(recorded: int | None, alive: bool) -> int:
    """The state that a process recorded last; killed if it died without recording an end."""
    state = STATES["starting"] if recorded is None else recorded
    if state not in STATES.values():
        state = STATES["running"]
    if state not in ENDED and not alive:
        return STATES["killed"]
    return state


def long_texts(reader: JournalReader) -> dict[str, Any]:
    """The long parts of a process's description."""
    return {
        "description": reader.identity.get("description"),
        "config": reader.config,
        "summary": summary.described(reader),
    }


def describe(
    reader: JournalReader, state: int, last_step: int | None, seen_alive_ns: int
) -> dict[str, Any]:
    """The description of one process, for people and as JSON."""
    identity = reader.identity
    progress = reader.progress()
    phase, since_ns, steps = "other", reader.created_ns, [last_step]
    if progress is not None:
        phase = phase_word(progress.phase_code)
        # A name belongs to a phase without a code; phases with codes may lie inside it.
        name = reader.names.get(progress.phase_name)
        if phase == "other" and name is not None:
            phase = name.text
        since_ns = reader.created_ns + progress.phase_after_ns
        steps.append(progress.step)
    return {
        "run": identity.get("run"),
        "group": identity.get("group"),
        "job_type": identity.get("job_type"),
        "project": identity.get("project"),
        "name": identity.get("name"),
        "tags": identity.get("tags"),
        "node": identity.get("node") or identity.get("host"),
        "host": identity.get("host"),
        "rank": identity.get("global_rank"),
        "local_rank": identity.get("local_rank"),
        "world_size": identity.get("world_size"),
        "node_rank": identity.get("node_rank"),
        "trains": bool(identity.get("restarts")) or finished_workers.made_steps(reader),
        "proxy": finished_workers.is_proxy(reader),
        "launcher": identity.get("launcher"),
        "strategy": identity.get("strategy"),
        "exported": bool(identity.get("exported")),
        "settled": bool(identity.get("settled")),
        "pid": reader.pid,
        "state": state_word(state),
        "reason": reader.reason(),
        "step": max((step for step in steps if step is not None), default=None),
        "phase": phase,
        "phase_since_ns": since_ns,
        # Of a dead process: when it was last seen alive; unknown if no agent ran.
        "seen_alive_ns": seen_alive_ns or None,
        "started_ns": reader.created_ns,
        "lost": reader.lost,
        "journal": reader.path.name,
    }
