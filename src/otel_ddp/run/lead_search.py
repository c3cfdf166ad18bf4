"""Finds out where the agent is that leads this run, by the process group."""

from __future__ import annotations

import os
from typing import Any

from otel_ddp.identity import launchers, lead
from otel_ddp.identity.identity import GroupFacts
from otel_ddp.identity.lead import Lead
from otel_ddp.settings import Settings


def is_sought(conf: Settings) -> bool:
    """Whether the ranks of a run agree on its lead."""
    # The stores of torchft's replica groups know nothing of each other.
    return conf.lead != "off" and launchers.replicas(os.environ) is None


class LeadSearch:
    """One a run."""

    def __init__(self, *, is_sought: bool = False) -> None:
        self.is_sought = is_sought
        """Whether the process group may still tell more of it."""
        self._found: Lead | None = None
        self._was_told = False

    def is_due(self, *, has_synced: bool) -> bool:
        """Whether to ask now. *has_synced*: a step has ended, so each rank has begun one."""
        # In between a rank that is not the first would ask in vain.
        return self.is_sought and (has_synced or not self._was_told)

    def heard(self, group: GroupFacts, *, has_synced: bool) -> None:
        """What the process group has said."""
        self._found = group.lead or self._found
        # Rank 0 may come last to say where it is, but before its first step ends.
        self.is_sought &= group.lead is not None and group.global_rank != 0 and not has_synced
        self._was_told = True

    def facts(self) -> dict[str, Any]:
        """The fact for the journal, if the lead is known."""
        return {} if self._found is None else {lead.FACT: self._found.as_json()}
