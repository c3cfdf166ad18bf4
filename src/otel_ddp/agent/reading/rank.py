"""What the sources of the node need to know of a rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from otel_ddp.agent.ledger import Labels


class Rank(NamedTuple):
    """A living process of this node."""

    labels: Labels
    pid: int
    """As the agent sees it; 0 where it cannot."""
    start_ticks: int
    facts: Mapping[str, Any]
