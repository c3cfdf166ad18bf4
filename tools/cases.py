"""Replays simulated trainings through the detectors, and writes tables of the verdicts."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from otel_ddp.diagnosis.detector import Observation, RankState
from otel_ddp.diagnosis.step_facts import StepFacts
from otel_ddp.diagnosis.straggler.detector import Stragglers
from otel_ddp.diagnosis.straggler.finding import side_of
from otel_ddp.diagnosis.verdict import Labels

PAGE = Path(__file__).parents[1] / "docs" / "internals" / "diagnosis.md"
NOW_NS = 1_700_000_000_000_000_000


def labels_of(rank: int, node: int = 0) -> Labels:
    """The labels of a rank."""
    return (
        ("group", ""),
        ("run", "case"),
        ("job_type", "train"),
        ("node", f"node-{node}"),
        ("rank", str(rank)),
        ("local_rank", str(rank)),
    )


class Named(NamedTuple):
    """The first verdict on a rank or node."""

    kind: str
    phase: str
    side: str
    waits_in: str
    step: int
    """The number of steps since it began."""


class Found(NamedTuple):
    """The verdicts in a case."""

    named: dict[int | str, Named]
    """By rank, or by the name of a node."""
    kinds: set[str]
    after_s: tuple[float, ...]
    """How long after the fault each verdict on a rank or node was opened."""
    # At the end.
    bound: str
    insufficient: str


class Replay:
    """The detectors of one case."""

    def __init__(self, states: Sequence[RankState], begins: int) -> None:
        """*begins*: the number of the step after which ranks are late."""
        self._detector = Stragglers()
        self._states, self._begins = states, begins
        self._began_ns = 0
        self._found = Found({}, set(), (), "", "")

    def feed(self, ranks: Sequence[Sequence[StepFacts]]) -> None:
        """Add steps of each rank."""
        for state, facts in zip(self._states, ranks, strict=True):
            self._detector.feed(state, Observation(facts=facts))
        ended_ns = [each.ended_ns for each in ranks[0] if each.number <= self._begins]
        self._began_ns = max([self._began_ns, *ended_ns])
        now_ns = ranks[0][-1].ended_ns if ranks[0] else 0
        for verdict, opened in self._detector.poll(0):
            self._found.kinds.add(verdict.kind)
            if not opened or verdict.kind not in ("straggler", "imbalance"):
                continue
            labels, where = dict(verdict.labels), str(verdict.evidence.get("waits_in", ""))
            who = int(labels["rank"]) if "rank" in labels else labels["node"]
            step = (verdict.step or 0) - self._begins
            named = Named(verdict.kind, verdict.phase, side_of(verdict), where, step)
            self._found.named.setdefault(who, named)
            after_s = (*self._found.after_s, (now_ns - self._began_ns) / 1e9)
            self._found = self._found._replace(after_s=after_s)
        for verdict, opened in self._detector.bounds.poll(0):
            self._found = self._found._replace(bound=verdict.phase if opened else "")

    def found(self) -> Found:
        """The verdicts so far."""
        return self._found._replace(insufficient=self._detector.report().insufficient)


# -- tables


def row(*cells: object) -> str:
    """A row of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def shares(*right: Sequence[bool]) -> str:
    """A cell with the percentage of true values of each."""
    return ", ".join(f"{sum(each) / len(each) * 100:.1f}" for each in right if each)


def soon(after: Sequence[float]) -> str:
    """A cell with the median and the maximum."""
    ordered = sorted(after)
    return f"{ordered[len(ordered) // 2]:.0f}, {ordered[-1]:.0f}" if ordered else ""


def main(tables: Mapping[str, Callable[[], Iterable[str]]]) -> None:
    """Print tables, and write them between their marks on the page."""
    parser = argparse.ArgumentParser(description="Writes tables of docs/internals/diagnosis.md.")
    parser.add_argument("table", nargs="*", help=f"any of: {', '.join(tables)}; without, all")
    asked = parser.parse_args().table
    if unknown := {*asked} - tables.keys():
        parser.error(f"there is no table {', '.join(sorted(unknown))}")
    for name in asked or tables:
        lines = []
        for line in tables[name]():
            print(line, flush=True)
            lines.append(line)
        before, begin, rest = PAGE.read_text().partition(f"<!-- {name}: begin -->")
        _, end, after = rest.partition(f"<!-- {name}: end -->")
        PAGE.write_text("\n".join([before + begin, *lines, end + after]))
