"""Writes verdicts into the ledger as series: late ranks, lost time, stalls, deaths."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from otel_ddp import errors
from otel_ddp.agent.judge.reports import compared_ranks, plain
from otel_ddp.agent.judge.run_case import RunCase
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.diagnosis.death.cause import FOLLOWS_S
from otel_ddp.diagnosis.say import rank_number
from otel_ddp.diagnosis.straggler.finding import is_about, side_of
from otel_ddp.diagnosis.verdict import Verdict, node_of
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.words import RANK_LABELS, Kind, is_taken_back

# For each kind of verdict: the metric with a series for each rank and phase of a verdict.
_OF_RANKS: Mapping[Kind, catalog.Metric] = {
    "straggler": catalog.TRAINING_STRAGGLER,
    "imbalance": catalog.TRAINING_IMBALANCE,
    "recurring": catalog.TRAINING_RECURRING_STALL,
}
# For each kind of verdict: the metric of a verdict on a whole node; its ranks have theirs too.
_OF_NODES: Mapping[Kind, catalog.Metric] = {
    "straggler": catalog.TRAINING_NODE_STRAGGLER,
    "imbalance": catalog.TRAINING_NODE_IMBALANCE,
}


class _Row(NamedTuple):
    """One series and the value to export for it."""

    metric: catalog.Metric
    labels: Labels
    value: float
    stays_at: float | None = None
    """The value to export once the row is no longer yielded; None: the series is removed then."""


class VerdictSeries:
    """The series of the verdicts on one run. The caller holds the ledger's lock."""

    def __init__(self, ledger: Ledger, origin_ns: int) -> None:
        """*origin_ns*: the start time of all counters, in nanoseconds since 1970."""
        self._ledger = ledger
        # The series that the last update wrote, each with the value to export once the series is no
        # longer current (None: remove it then).
        self._shown: dict[tuple[catalog.Metric, Labels], float | None] = {}
        # For each rank: the node of the agent that judged it last, the lost time that this agent
        # has counted, and the sum over all agents.
        self._lost: dict[Labels, tuple[str, float, float]] = {}
        # For each rank, the causes of its deaths. The key of a death: the node of the agent that
        # reported it first (empty for this agent), and the time of the death.
        self._died: defaultdict[Labels, dict[tuple[str, int], str]] = defaultdict(dict)
        self._origin_ns = origin_ns

    def update_series(self, case: RunCase, now_ns: int) -> None:
        """Write the run's current series into the ledger, and end those that are not current."""
        shown: dict[tuple[catalog.Metric, Labels], float | None] = {}
        summed_up = (self._lost_time, self._deaths)
        for rows in (*summed_up, _speed, _waits, _named, _stalls, _own_collectives):
            for metric, labels, value, stays_at in _contained(rows, case):
                if case.is_here(labels):
                    self._ledger.put(metric, labels, value, now_ns, self._origin_ns)
                    shown[metric, labels] = stays_at
        for (metric, labels), stays_at in self._shown.items():
            if (metric, labels) in shown:
                continue
            # This ends series of open verdicts too: another agent may have become the lead, i.e.
            # the agent that judges the run.
            if stays_at is None:
                self._ledger.forget(self._ledger.series(metric, labels))
            else:
                self._ledger.put(metric, labels, stays_at, now_ns, self._origin_ns)
        self._shown = shown

    def _lost_time(self, case: RunCase) -> Iterator[_Row]:
        by = "" if case.judgement is None else case.judgement.by
        for rank in case.report().ranks:
            if not case.is_here(rank.labels):
                continue
            # Each agent counts lost time from its own start. Add up the differences, so that the
            # exported sum never falls when another agent takes over.
            last, before_s, sum_s = self._lost.get(rank.labels, (by, 0.0, 0.0))
            if last == by:
                sum_s += max(rank.lost_s - before_s, 0.0)
            self._lost[rank.labels] = by, rank.lost_s, sum_s
            metric = catalog.TRAINING_STRAGGLER_LOST_TIME
            yield _Row(metric, rank.labels, sum_s, stays_at=sum_s)

    def _deaths(self, case: RunCase) -> Iterator[_Row]:
        for by, verdict in _verdicts(case):
            who = verdict["who"]
            if verdict["kind"] == "death" and "rank" in who:
                labels = tuple((name, who[name]) for name in RANK_LABELS if name in who)
                _note(self._died[labels], by, verdict["since_ns"], verdict["evidence"])
        for labels, deaths in self._died.items():
            for cause, times in Counter(deaths.values()).items():
                yield _Row(catalog.TRAINING_DEATHS, (*labels, ("cause", cause)), float(times))


def _note(
    deaths: dict[tuple[str, int], str], by: str, since_ns: int, evidence: Mapping[str, Any]
) -> None:
    """Add a death, but only once if a verdict repeats it, or if this agent and the lead report it.

    *by*: the node of the agent that reported it, whose clock may differ; empty for this agent.
    """
    key = by, since_ns
    if key not in deaths:
        others = (each for each in deaths if each[0] != by)
        key = next((each for each in others if abs(each[1] - since_ns) <= FOLLOWS_S * 1e9), key)
    if is_taken_back(evidence):
        deaths.pop(key, None)
    else:
        deaths[key] = str(evidence["cause"])


@errors.contained(default=())
def _contained(rows: Callable[[RunCase], Iterable[_Row]], case: RunCase) -> Iterable[_Row]:
    return list(rows(case))


def _verdicts(case: RunCase) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """All verdicts on a run as JSON, each with the node of the agent that reported it (empty for
    this agent): this agent's, and those of an agent that leads the run now."""
    reports, led = case.reports, case.judgement
    own = [*reports.past, *(plain(each.shown) for each in reports.open.values())]
    yield from (("", each) for each in own)
    if led is not None:
        yield from ((led.by, each) for each in (*led.past, *led.open))


def _open_verdicts(case: RunCase) -> list[Verdict]:
    """The open verdicts on a run: this agent's, and those of an agent that leads the run now."""
    found = [each.shown for each in case.reports.open.values()]
    for led in () if case.judgement is None else case.judgement.open:
        who = tuple(led["who"].items())
        found.append(Verdict(led["kind"], who, led["phase"], "", led["evidence"]))
    return found


def _named(case: RunCase) -> Iterator[_Row]:
    ranks = [each.labels for each in case.sources if each.is_here]
    here = dict.fromkeys([*ranks, *map(node_of, ranks)])
    for verdict in _open_verdicts(case):
        if verdict.kind not in _OF_RANKS:
            continue
        side = side_of(verdict) if verdict.kind == "straggler" else ""
        of_side = [("side", side)] if side else []
        for labels in here:
            if labels != verdict.labels and not is_about(verdict, labels):
                continue
            metric = (_OF_RANKS if "rank" in dict(labels) else _OF_NODES)[verdict.kind]
            where = (*labels, ("phase", verdict.phase), *of_side)
            yield _Row(metric, where, 1.0, stays_at=0.0)


def _speed(case: RunCase) -> Iterator[_Row]:
    report, led = case.report(), case.judgement
    if report.insufficient:
        return
    nodes = set[Labels]()
    for rank in report.ranks:
        if not case.is_here(rank.labels):
            continue
        if rank.work_s is not None:
            nodes.add(node_of(rank.labels))
        # This series with an empty phase exists for every rank in the report, even if the rank is
        # never late.
        yield _Row(catalog.TRAINING_STRAGGLER, (*rank.labels, ("phase", "")), 0.0)
        for phase, share in rank.excess.items():
            yield _Row(catalog.TRAINING_STRAGGLER_EXCESS, (*rank.labels, ("phase", phase)), share)
    compared = compared_ranks(report) if led is None else led.compared
    for node in nodes:
        yield _Row(catalog.TRAINING_COMPARED_RANKS, node, float(compared))


def _waits(case: RunCase) -> Iterator[_Row]:
    for rank in case.report().ranks:
        for kind, each_s in rank.waits_s.items():
            more = zip(catalog.COLLECTIVE, kind, strict=True)
            yield _Row(catalog.TRAINING_COLLECTIVE_STEP_WAIT, (*rank.labels, *more), each_s)


def _stalls(case: RunCase) -> Iterator[_Row]:
    stalls = [each.evidence for each in _open_verdicts(case) if each.kind == "stall"]
    for rank in case.training:
        yield _Row(catalog.TRAINING_STALLED, rank.labels, float(bool(stalls)))
        for evidence in stalls:
            if rank_number(rank.labels) in evidence["culprits"]:
                where = (*rank.labels, ("cause", evidence["cause"]))
                yield _Row(catalog.TRAINING_STALL_CULPRIT, where, 1.0)


def _own_collectives(case: RunCase) -> Iterator[_Row]:
    for rank in case.training:
        for phase in rank.own_collectives:
            yield _Row(catalog.TRAINING_OWN_COLLECTIVES, (*rank.labels, ("phase", phase)), 1.0)
