"""Surveys a node without an agent: by the journals, and by what an agent has written last."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from otel_ddp import files, plain
from otel_ddp.journal.parser import Journal, Unreadable
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import (
    End,
    ProcessState,
    ended_by_parent,
    parent,
    state_of,
    table,
)
from otel_ddp.journal.reader import JournalReader
from otel_ddp.journal.values import described

# An agent writes its file every few seconds.
_STOPPED_S = 20.0
# By then an agent has started, and a process that replaced another one is alone.
_LONG_HERE_NS = 10_000_000_000

_Rows = list[dict[str, Any]]
_OF_RANK = ("group", "run", "job_type", "rank")


@dataclass(frozen=True)
class Survey:
    """The agents and processes of a node, and what the agents have found."""

    agents: _Rows = field(default_factory=list)
    processes: list[ProcessState] = field(default_factory=list)
    verdicts: _Rows = field(default_factory=list)
    past: _Rows = field(default_factory=list)
    notes: _Rows = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    unserved: _Rows = field(default_factory=list)
    """The places whose processes wait for an agent."""
    doubled: _Rows = field(default_factory=list)
    """The ranks that several processes claim to be: the metrics show only one of these."""
    links: _Rows = field(default_factory=list)
    """By run, how the agents of its nodes are linked, in a sentence."""

    def looks(self, run: str = "") -> list[str]:
        """Where other ranks of these runs are shown, each once. *run*: of this one alone."""
        told = [each for each in self.links if run in ("", each.get("run"))]
        return list(dict.fromkeys(str(each["look"]) for each in told if each.get("look")))

    def to_json(self) -> dict[str, Any]:
        """As `otel-ddp status --json` shows it."""
        return {**vars(self), "processes": [each.to_json() for each in self.processes]}


def survey(places: list[Place], now_ns: int | None = None) -> Survey:
    """Everything that `otel-ddp status` shows."""
    now_ns = time.time_ns() if now_ns is None else now_ns
    found = Survey()
    for place in places:
        # The journals first: the agent describes a process before it deletes its journal.
        here, faults = _processes(place)
        agent, about = _agent(place)
        # Their journals are deleted, or soon will be: only the agent still knows them.
        told = map(ProcessState.from_json, _rows(about, "ended"))
        ended = [each for each in told if each is not None]
        known = {each.journal for each in ended}
        names = plain.mapping(about.get("nodes"))
        here = [
            replace(each, node=str(names.get(each.journal) or each.node))
            for each in here
            if each.journal not in known
        ]
        found.processes.extend(ended)
        if agent["alive"]:
            found.processes.extend(_paced([*here, *elsewhere(about)], _rows(about, "paces")))
            found.links.extend(_rows(about, "links"))
        else:
            found.processes.extend(here)
        found.unreadable.extend(why for name, why in faults.items() if name not in known)
        found.past.extend(_verdicts(about, "past"))
        if agent["alive"]:
            # Without an agent it is unknown whether these are still true.
            found.verdicts.extend(_verdicts(about, "verdicts"))
            found.notes.extend(_rows(about, "notes"))
        if agent["alive"] or agent.get("pid"):
            found.agents.append(agent)
        long_here = [
            each for each in here if not each.ended and now_ns - each.started_ns > _LONG_HERE_NS
        ]
        found.doubled.extend(_doubled(long_here))
        if long_here and not agent["alive"]:
            where = {"directory": str(place.directory), "agent_log": place.last_line()}
            found.unserved.append({**where, "processes": len(long_here)})
    # The agent still lists a run that is over, because one rank or none is left of it.
    going = {each.of_run for each in found.processes if not each.ended}
    for agent in found.agents:
        agent["insufficient"] = [each for each in agent["insufficient"] if of_run(each) in going]
    return replace(found, processes=table(found.processes))


def elsewhere(about: Mapping[str, Any]) -> list[ProcessState]:
    """The processes of other nodes that an agent tells of: of the runs that it leads."""
    return list(filter(None, map(ProcessState.from_json, _rows(about, "elsewhere"))))


def _paced(processes: list[ProcessState], paces: _Rows) -> Iterator[ProcessState]:
    """The same processes; the living ones with what their agent knows of their last steps."""
    by_rank = {tuple(str(each.get(name)) for name in _OF_RANK): each for each in paces}
    for each in processes:
        told = by_rank.get(tuple(str(getattr(each, name)) for name in _OF_RANK))
        if told is None or each.ended:
            yield each
        else:
            step_s, wait_ratio = (
                plain.number(told.get(key), 0, 1e9) for key in ("step_s", "wait_ratio")
            )
            yield replace(each, step_s=step_s, wait_ratio=wait_ratio)


def of_run(labels: Mapping[str, Any]) -> tuple[str, str]:
    """Group and name of the run that these are about."""
    return str(labels.get("group") or ""), str(labels.get("run") or "")


def _processes(place: Place) -> tuple[list[ProcessState], dict[str, str]]:
    """The processes with a journal; and by its name, why another journal cannot be read."""
    found: list[ProcessState] = []
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


def _process(reader: JournalReader) -> ProcessState:
    alive = reader.writer_is_alive()
    reader.read_definitions()
    last_step = max((r.step for r in reader.latest() if r.step is not None), default=None)
    progress = reader.progress()
    lives = os.path.exists(f"/proc/{parent(reader)}")
    ended_well = ended_by_parent(reader, End(parent_lives=lives))
    state = state_of(None if progress is None else progress.state, alive, ended_well)
    seen_ns = time.time_ns() if alive else 0
    found = ProcessState.read(reader, state, of_values=last_step, seen_alive_ns=seen_ns)
    return with_texts(found, reader)


def with_texts(process: ProcessState, reader: Journal) -> ProcessState:
    """The same with its long texts."""
    return replace(
        process,
        description=str(reader.identity.get("description") or ""),
        config=reader.config,
        summary=described(reader),
    )


def _doubled(living: Iterable[ProcessState]) -> Iterator[dict[str, Any]]:
    by_rank: dict[tuple[Any, ...], list[ProcessState]] = {}
    for each in living:
        if each.settled and each.rank is not None:
            by_rank.setdefault((*each.of_run, each.job_type, each.node, each.rank), []).append(each)
    for one, *others in by_rank.values():
        if others:
            pids = [each.pid for each in (one, *others)]
            yield {"group": one.group, "run": one.run, "rank": one.rank, "pids": pids}


def _agent(place: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is shown of the agent itself, and all that its file holds."""
    about, silent_s = files.read_mapping(place.agent_file), 0.0
    with contextlib.suppress(OSError):
        silent_s = time.time() - place.agent_file.stat().st_mtime
    # From the kernel, as numbered here; the agent's own number is of its PID namespace.
    pid = place.agent_pid()
    alive = pid is not None
    apart = ("nodes", "ended", "elsewhere", "paces", "links", "verdicts", "past", "notes")
    agent = {key: value for key, value in about.items() if key not in apart}
    if alive and not about:
        agent = {"pid": pid or None, "starting": True}
    if alive and silent_s > _STOPPED_S:
        agent["stopped"] = True
        agent["remark"] = f"the agent has not moved for {silent_s:.0f} s: it is stopped, or hangs"
    agent |= {
        "alive": alive,
        "pid_here": pid,
        "directory": str(place.directory),
        "insufficient": _rows(about, "insufficient") if alive else [],
    }
    return agent, about


def _rows(about: Mapping[str, Any], key: str) -> _Rows:
    return plain.list_of(dict, about.get(key))


def _verdicts(about: Mapping[str, Any], key: str) -> _Rows:
    """Those that say whom they are about."""
    return [each for each in _rows(about, key) if isinstance(each.get("who"), dict)]
