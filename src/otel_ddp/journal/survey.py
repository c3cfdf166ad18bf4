"""The status of a node as one document, from its agents.

An agent writes it into its file, and serves it to the page. `otel-ddp status` merges the documents
of all agents, and counts processes without an agent.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from otel_ddp import files, plain
from otel_ddp.journal import process_state
from otel_ddp.journal.parser import Unreadable
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import JournalReader

SCHEMA = 8
"""The version of the document's format; docs/json.md describes each key."""
# An agent writes its file every few seconds. If the file is older than this, the agent hangs, or it
# was suspended.
_STOPPED_S = 20.0
# `otel-ddp status` reports a process that has no agent for longer than this; usually an agent
# starts sooner.
_LONG_HERE_NS = 10_000_000_000

_Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Survey:
    """The status of a node: its agents, its processes, and the verdicts on their runs."""

    agents: _Rows = field(default_factory=list)
    processes: list[process_state.ProcessState] = field(default_factory=list)
    """The processes on this node. If its agent leads a run, also this run's on other nodes."""
    verdicts: _Rows = field(default_factory=list)
    past: _Rows = field(default_factory=list)
    insufficient: _Rows = field(default_factory=list)
    """The runs whose ranks cannot be compared, each with the reason."""
    unreadable: list[str] = field(default_factory=list)
    unserved: _Rows = field(default_factory=list)
    """The journal directories in which processes wait for an agent."""
    links: _Rows = field(default_factory=list)
    """For each run on several nodes: a sentence on the connections between the nodes' agents."""

    @property
    def agent(self) -> Mapping[str, Any]:
        """The first agent, which is mostly the only one; empty if there is no agent."""
        return self.agents[0] if self.agents else {}

    def looks(self, run: str = "") -> list[str]:
        """Sentences that say where to see the ranks on other nodes. *run*: only for this run."""
        rows = [each for each in self.links if run in ("", each.get("run"))]
        return list(dict.fromkeys(str(each["look"]) for each in rows if each.get("look")))

    def to_json(self) -> dict[str, Any]:
        """The document for `otel-ddp status --json`, and for an agent's file."""
        processes = [each.to_json() for each in self.processes]
        return {"schema": SCHEMA, **vars(self), "processes": processes}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Survey:
        """The inverse of `to_json`. Of a document of another version, it reads only the agents."""
        content = {**found}
        if content.pop("schema", None) != SCHEMA:
            return cls(agents=plain.list_of(dict, content.get("agents")))
        processes = [process_state.ProcessState(**each) for each in content.pop("processes")]
        return cls(processes=processes, **content)


def last_of_agent(place: Place) -> Survey:
    """The status that the last agent of this journal directory has written into its file."""
    return Survey.from_json(files.read_mapping(place.agent_file))


def leave(place: Place, status: Survey) -> None:
    """Write the agent's file for the next agent, before this one ends. The file lists only the
    processes whose journals remain."""
    here = {path.name for path in place.journals()}
    left = [each for each in status.processes if each.journal in here]
    files.remove(place.agent_file)
    if left:
        with contextlib.suppress(OSError):
            files.replace(place.agent_file, json.dumps(Survey(processes=left).to_json()))


def survey(places: list[Place], now_ns: int | None = None) -> Survey:
    """Everything that `otel-ddp status` shows."""
    now_ns = time.time_ns() if now_ns is None else now_ns
    found = Survey()
    for place in places:
        status = last_of_agent(place)
        agent = _agent(place, status)
        alive = agent["alive"]
        # If the agent is dead, its file is outdated, except for processes that had ended.
        found.processes.extend(each for each in status.processes if alive or each.ended)
        found.past.extend(status.past)
        if alive or agent.get("pid"):
            found.agents.append(agent)
        if alive:
            for key in ("verdicts", "insufficient", "links", "unreadable"):
                getattr(found, key).extend(getattr(status, key))
        elif waiting := _waiting(place, now_ns):
            where = {"directory": str(place.directory), "agent_log": place.last_line()}
            found.unserved.append({**where, "processes": waiting})
    # Remove runs that have ended: the agent reports that their ranks can't be compared, but only
    # because fewer than two of them are alive.
    going = {each.of_run for each in found.processes if not each.ended}
    insufficient = [each for each in found.insufficient if of_run(each) in going]
    return replace(found, processes=process_state.table(found.processes), insufficient=insufficient)


def of_run(labels: Mapping[str, Any]) -> tuple[str, str]:
    """The group and the name of the run to which these labels belong."""
    return str(labels.get("group") or ""), str(labels.get("run") or "")


def _waiting(place: Place, now_ns: int) -> int:
    """How many living processes have waited for an agent for longer than _LONG_HERE_NS."""
    count = 0
    for path in place.journals():
        # Skip a journal that was deleted after it was listed.
        with contextlib.suppress(Unreadable):
            reader = JournalReader(path)
            count += reader.writer_is_alive() and now_ns - reader.created_ns > _LONG_HERE_NS
            reader.close()
    return count


def _agent(place: Place, status: Survey) -> dict[str, Any]:
    """The row of a directory's agent in the status."""
    # Use the pid that the kernel reports for the lock, which is valid in our PID namespace. The
    # agent's file has the pid in the agent's namespace.
    pid, silent_s = place.agent_pid(), 0.0
    with contextlib.suppress(OSError):
        silent_s = time.time() - place.agent_file.stat().st_mtime
    alive = pid is not None
    agent = {**status.agent}
    if alive and not agent:
        agent = {"pid": pid or None, "starting": True}
    if alive and silent_s > _STOPPED_S:
        agent["stopped"] = True
        agent["remark"] = f"the agent has not moved for {silent_s:.0f} s: it is stopped, or hangs"
    return agent | {"alive": alive, "pid_here": pid, "directory": str(place.directory)}
