"""What telemetry has cost a run on this node, over all its processes and agents."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_ddp.vocabulary import catalog

# Of hooks, and of the steps that they are a share of.
_OF_PROCESS = (catalog.OTEL_DDP_HOOK_TIME.name, catalog.TRAINING_STEP_DURATION.name)


class OwnCost:
    """Of one run. Only the thread that writes its history calls it."""

    def __init__(self) -> None:
        self.agent_cpu_s = 0.0
        """Of the agents of this node."""
        self._nodes_cpu_s: dict[str, float] = {}
        # The totals of processes whose ranks have another one by now; and the newest of each rank.
        self._earlier: dict[str, float] = {}
        self._newest: dict[str, Mapping[str, Any]] = {}

    def restore(self, cost: Mapping[str, Any], ranks: Mapping[str, Mapping[str, Any]]) -> None:
        """What an earlier agent has kept; nothing if this one has counted already."""
        if not (self._newest or self.agent_cpu_s):
            self.agent_cpu_s = cost.get("agent_cpu_s", 0.0)
            self._earlier, self._newest = {**cost.get("earlier", {})}, {**ranks}
            self._nodes_cpu_s = {**cost.get("nodes", {})}

    def add(
        self,
        ranks: Mapping[str, Mapping[str, Any]],
        agent_cpu_s: float,
        nodes_cpu_s: Mapping[str, float],
    ) -> None:
        """The ranks as they are now, and what this agent has needed for the run since the last.

        *nodes_cpu_s*: what the agents of other nodes have needed until now.
        """
        self.agent_cpu_s += agent_cpu_s
        self._nodes_cpu_s |= nodes_cpu_s
        for rank, each in ranks.items():
            before = self._newest.get(rank, each)
            if before.get("started_ns", 0) < each.get("started_ns", 0):
                for name in _OF_PROCESS:
                    total = before.get("totals", {}).get(name, 0.0)
                    self._earlier[name] = self._earlier.get(name, 0.0) + total
            self._newest[rank] = each

    def to_json(self) -> dict[str, Any]:
        """Of `about`; the newest processes are among the ranks."""
        nodes = {node: round(cpu_s, 1) for node, cpu_s in self._nodes_cpu_s.items()}
        found = {"agent_cpu_s": round(self.agent_cpu_s, 1), "earlier": {**self._earlier}}
        return {**found, "nodes": nodes} if nodes else found
