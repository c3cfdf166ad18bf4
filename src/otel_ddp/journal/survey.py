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
"""The version of the document; docs/json.md describes each key."""
# An agent writes its file every few seconds. If the file is older than this, the agent hangs or is
# stopped.
_STOPPED_S = 20.0
# A process that has no agent for longer than this is reported: usually an agent starts sooner.
_LONG_HERE_NS = 10_000_000_000

_Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Survey:
    """The agents and processes of a node, and their verdicts."""

    agents: _Rows = field(default_factory=list)
    processes: list[process_state.ProcessState] = field(default_factory=list)
    """The processes of this node; of runs that its agent leads, also those of other nodes."""
    verdicts: _Rows = field(default_factory=list)
    past: _Rows = field(default_factory=list)
    insufficient: _Rows = field(default_factory=list)
    """Runs whose ranks cannot be compared, and why."""
    unreadable: list[str] = field(default_factory=list)
    unserved: _Rows = field(default_factory=list)
    """Directories whose processes wait for an agent."""
    links: _Rows = field(default_factory=list)
    """For each run on several nodes, a sentence on the links between their agents."""

    @property
    def agent(self) -> Mapping[str, Any]:
        """The only agent, or the first one; empty without any."""
        return self.agents[0] if self.agents else {}

    def looks(self, run: str = "") -> list[str]:
        """Texts on where the ranks of other nodes are shown. *run*: only for this run."""
        rows = [each for each in self.links if run in ("", each.get("run"))]
        return list(dict.fromkeys(str(each["look"]) for each in rows if each.get("look")))

    def to_json(self) -> dict[str, Any]:
        """For `otel-ddp status --json` and an agent's file."""
        processes = [each.to_json() for each in self.processes]
        return {"schema": SCHEMA, **vars(self), "processes": processes}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Survey:
        """The inverse of `to_json`. From a document of another version, only agents are read."""
        content = {**found}
        if content.pop("schema", None) != SCHEMA:
            return cls(agents=plain.list_of(dict, content.get("agents")))
        processes = [process_state.ProcessState(**each) for each in content.pop("processes")]
        return cls(processes=processes, **content)


def last_of_agent(place: Place) -> Survey:
    """The last status that the agent of a directory has written."""
    return Survey.from_json(files.read_mapping(place.agent_file))


def leave(place: Place, status: Survey) -> None:
    """When an agent ends: write a file for the next one, with processes whose journals remain."""
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
        # Without a live agent, the file is current only for processes that have ended.
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
    # Leave out ended runs. The agent lists them too, as fewer than two of their ranks are alive.
    going = {each.of_run for each in found.processes if not each.ended}
    insufficient = [each for each in found.insufficient if of_run(each) in going]
    return replace(found, processes=process_state.table(found.processes), insufficient=insufficient)


def of_run(labels: Mapping[str, Any]) -> tuple[str, str]:
    """Group and name of the run in these labels."""
    return str(labels.get("group") or ""), str(labels.get("run") or "")


def _waiting(place: Place, now_ns: int) -> int:
    """How many living processes have waited for an agent for longer than _LONG_HERE_NS."""
    count = 0
    for path in place.journals():
        # The journal may have been deleted meanwhile.
        with contextlib.suppress(Unreadable):
            reader = JournalReader(path)
            count += reader.writer_is_alive() and now_ns - reader.created_ns > _LONG_HERE_NS
            reader.close()
    return count


def _agent(place: Place, status: Survey) -> dict[str, Any]:
    """The row of the agent in the status."""
    # The kernel gives the pid in our PID namespace; the agent writes the pid in its own namespace.
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
