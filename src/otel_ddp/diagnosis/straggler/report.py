"""How the ranks of a run on one node compare at this moment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from otel_ddp.diagnosis.verdict import Kind, Labels


class RankReport(NamedTuple):
    """How one rank compares with the others."""

    labels: Labels
    kind: Kind | None
    """`straggler` or `imbalance` while there is a verdict on it."""
    phase: str
    excess: Mapping[str, float]
    """More time than the others need, as shares of the median step, by phase, and `all`.

    Phases with collectives of the user's own are not in it.
    """
    lost_s: float
    """What the other ranks of the job have waited for it while there were verdicts on it."""


class Report(NamedTuple):
    """All ranks of a run on this node."""

    ranks: tuple[RankReport, ...]
    """Also ranks that have ended and have cost something."""
    work_max_s: float | None
    """The work of the rank that needs the most."""
    work_median_s: float | None
    insufficient: str
    """`insufficient data: ...` where the ranks cannot be compared.

    Then the absence of a verdict means nothing.
    """
