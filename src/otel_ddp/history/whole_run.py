"""A run as a whole: what its histories of all nodes say together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any

from otel_ddp import catalog
from otel_ddp.history.reader import (
    DAMAGE,
    Bucket,
    History,
    Series,
    StepBucket,
    damaged,
    rank_order,
)

_WORST = ("finished", "starting", "running", "failed", "killed")


class WholeRun:
    """One run on all nodes whose histories are here."""

    def __init__(self, histories: Sequence[History]) -> None:
        # The node with rank 0 speaks for all.
        self.histories = sorted(histories, key=_first_rank)

    def __enter__(self) -> WholeRun:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        for each in self.histories:
            each.close()
        if isinstance(error, DAMAGE):
            raise damaged(self.histories, error) from error

    @property
    def group(self) -> str:
        return str(self.about.get("group") or "")

    @property
    def name(self) -> str:
        return str(self.about.get("run") or "?")

    @cached_property
    def about(self) -> dict[str, Any]:
        """What is known of the run: of the first node, and of others what that one lacks."""
        found: dict[str, Any] = {}
        for each in reversed(self.histories):
            found |= {key: value for key, value in each.about.items() if value not in (None, "")}
        for key, choose in (("began_ns", min), ("seen_ns", max)):
            if times := [each.about[key] for each in self.histories if each.about.get(key)]:
                found[key] = choose(times)
        found["cost"] = self._cost()
        return found

    def _cost(self) -> dict[str, float]:
        """Telemetry's own: of the hooks in all ranks, and of the agents of all nodes."""
        found: dict[str, float] = {}
        hooks = [_total(each, catalog.OTEL_DDP_HOOK_TIME.name) for each in self.ranks.values()]
        if known := [each for each in hooks if each is not None]:
            found["hook_s"] = sum(known)
        costs = [each.about.get("cost") for each in self.histories]
        agents = [each.get("agent_cpu_s") for each in costs if isinstance(each, dict)]
        if times := [each for each in agents if isinstance(each, (int, float))]:
            found["agent_cpu_s"] = sum(times)
        return found

    @cached_property
    def ranks(self) -> dict[str, dict[str, Any]]:
        """Each process by its rank."""
        found = {
            rank: about
            for each in self.histories
            for rank, about in each.ranks.items()
            if isinstance(about, dict)
        }
        return dict(sorted(found.items(), key=lambda item: rank_order(item[0])))

    @property
    def state(self) -> str:
        """`running`, or the worst end on any node."""
        states = [each.state for each in self.histories]
        if "running" in states:
            return "running"
        return max(states, key=lambda state: _WORST.index(state) if state in _WORST else 0)

    @property
    def nodes(self) -> list[str]:
        return [str(each.about.get("node") or "?") for each in self.histories]

    def verdicts(self) -> list[dict[str, Any]]:
        """Of all nodes, in the order of their beginning."""
        found = [verdict for each in self.histories for verdict in each.verdicts()]
        return sorted(found, key=lambda verdict: verdict.get("since_ns") or 0)

    # -- series

    def series(self, kind: str) -> Iterator[tuple[History, Series]]:
        """The series of a kind on every node."""
        for each in self.histories:
            for series in each.of_kind(kind):
                yield each, series

    def step_buckets(self) -> dict[str, tuple[str, int, list[StepBucket]]]:
        """Of each rank: the clock, the width of its buckets, and these."""
        found = {
            series.key.rank: (series.key.name, series.width, each.steps(series))
            for each in self.histories
            for series in each.step_series()
        }
        return dict(sorted(found.items(), key=lambda item: rank_order(item[0])))

    def values(self) -> dict[tuple[str, str], list[Bucket]]:
        """What was logged, by name and split: of the lowest rank that logged it."""
        found: dict[tuple[str, str], list[Bucket]] = {}
        for each, series in self.series("value"):
            key = series.key.name, dict(series.key.labels).get("split", "")
            if key not in found:
                found[key] = each.sums(series)
        return found


def _first_rank(history: History) -> tuple[bool, int, str]:
    return min(map(rank_order, history.ranks), default=(True, 0, ""))


def _total(about: dict[str, Any], name: str) -> float | None:
    totals = about.get("totals")
    value = totals.get(name) if isinstance(totals, dict) else None
    return float(value) if isinstance(value, (int, float)) else None
