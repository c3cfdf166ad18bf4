"""Judges all runs: feeds and polls their detectors, and reports the verdicts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_ddp import errors
from otel_ddp.agent.judge.reports import Judgement, VerdictReporter, compared_ranks, plain
from otel_ddp.agent.judge.run_case import RunCase
from otel_ddp.agent.judge.series import VerdictSeries
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.reading.process import Process
from otel_ddp.diagnosis.hardware import Cores, Gpu
from otel_ddp.diagnosis.verdict import Labels, run_labels
from otel_ddp.journal.parser import Document

_POLL_EVERY_NS = 500_000_000
# With more than 2000 processes a poll takes a tenth of a second, so poll only once a second.
_MANY, _POLL_MANY_EVERY_NS = 2000, 1_000_000_000
_MOST_SHOWN = 100


class Judge:
    """The judge of a node's runs. The agent's loop calls it after it has polled all processes."""

    def __init__(
        self,
        ledger: Ledger,
        floor_s: float,
        postmortems: Path,
        *,
        clock: Callable[[], int] = time.monotonic_ns,
        gpus: Callable[[], Sequence[Gpu]] = tuple,
        cores: Callable[[], Cores] = dict,
    ) -> None:
        """*floor_s*: the shortest stall limit. *gpus*: returns the node's devices. *cores*: returns
        for each rank the share of time in which it waited for a core."""
        self._ledger = ledger
        self._clock = clock
        self._floor_s = floor_s
        self._cases: dict[Labels, RunCase] = {}
        self._present: Sequence[Process] = []
        self._poll_at = 0
        # Times in verdicts are this origin plus the monotonic clock: wall time without jumps.
        self._origin_ns = time.time_ns() - clock()
        self._reporter = VerdictReporter(ledger, postmortems, gpus, cores)
        self._series: dict[Labels, VerdictSeries] = {}

    @errors.contained()
    def poll(
        self, sources: Iterable[Process], judgements: Mapping[Labels, Judgement] | None = None
    ) -> None:
        """Feed the detectors, poll them, and report changes.

        *judgements*: the judgements from agents on other nodes, by the run that the agent leads.
        """
        now_ns = self._origin_ns + self._clock()
        # Oldest first: if two processes have the same labels, the newer one replaces the older.
        present = sorted(sources, key=lambda each: each.began_ns)
        if present != self._present:
            self._present = present
            self._divide(present)
        due = now_ns >= self._poll_at or any(each.has_new_end() for each in self._cases.values())
        every_ns = _POLL_EVERY_NS if len(present) <= _MANY else _POLL_MANY_EVERY_NS
        self._poll_at = now_ns + every_ns if due else self._poll_at
        for case in self._cases.values():
            for source in case.sources:
                if source.is_here:
                    case.feed(source, now_ns, due=due)
                elif source.has_news:
                    # Records from other nodes arrive only once a second, so the process's position
                    # can be read each time.
                    case.feed(source, now_ns, due=True)
            if due:
                self._poll_case(case, now_ns, (judgements or {}).get(case.run))

    def _divide(self, sources: Sequence[Process]) -> None:
        """Assign the processes to their runs."""
        by_run: dict[Labels, list[Process]] = {run: [] for run in self._cases}
        for source in sources:
            by_run.setdefault(run_labels(source.labels), []).append(source)
        for run, of_run in by_run.items():
            if run not in self._cases:
                self._cases[run] = RunCase(run, self._floor_s, self._origin_ns)
                self._series[run] = VerdictSeries(self._ledger, self._origin_ns)
            self._cases[run].keep(of_run)

    @errors.contained()
    def _poll_case(self, case: RunCase, now_ns: int, judgement: Judgement | None) -> None:
        # Poll all detectors before reporting a verdict: a post-mortem lists all other verdicts.
        reports = case.reports
        reports.just_closed, reports.sources = None, case.sources
        changes = case.poll(judgement, now_ns)
        if judgement is not None:
            self._reporter.hand_over(reports, judgement.by, now_ns)
        for change in changes:
            self._reporter.report(reports, change, now_ns, case.ended_with(change.verdict))
        for verdict in case.present():
            self._reporter.update(reports, verdict)

    def flush_documents(self) -> list[tuple[Labels, str, list[Document]]]:
        """Take the log records that were not exported yet."""
        return self._reporter.flush_documents()

    def update_series(self, now_ns: int) -> None:
        """Update the series of verdicts. The caller holds the ledger's lock."""
        for run, case in self._cases.items():
            self._series[run].update_series(case, now_ns)

    def retire(self, runs: set[Labels]) -> None:
        """Close and forget all runs that are not in *runs*."""
        for run in [each for each in self._cases if each not in runs]:
            self._cases.pop(run).close()
            self._present = []
            del self._series[run]
            with self._ledger.lock:
                self._ledger.drop(run)

    def cases(self) -> list[RunCase]:
        """The cases of all runs."""
        return [*self._cases.values()]

    # -- for `status` and the page: threads of the endpoint call these too, so each list is a copy

    def verdicts(self) -> list[dict[str, Any]]:
        """The open verdicts."""
        return self._shown(self._open)

    def _open(self, case: RunCase) -> list[dict[str, Any]]:
        led = () if case.judgement is None else case.judgement.open
        own = [plain(each.shown) for each in [*case.reports.open.values()]]
        return [*(dict(each) for each in led), *own]

    def past(self) -> list[dict[str, Any]]:
        """The closed verdicts of runs that are still shown."""
        return self._shown(_past)

    def past_bounds(self) -> list[dict[str, Any]]:
        """The closed verdicts on the bottleneck of a run; only saved histories contain them."""
        return self._shown(lambda case: list(case.reports.past_bounds))

    def _shown(self, of: Callable[[RunCase], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        found = [each for case in list(self._cases.values()) for each in of(case)]
        return found[-_MOST_SHOWN:]

    def insufficient(self) -> list[dict[str, str]]:
        """The runs whose ranks cannot be compared, and why."""
        found = []
        for run, case in list(self._cases.items()):
            report = case.last_report
            if report is not None and report.insufficient:
                found.append({**dict(run), "why": report.insufficient})
        return found

    def judgement(self, run: Labels, by: str) -> Judgement | None:
        """This agent's judgement of a run, for the agents that follow it; None for an unknown run.

        *by*: the name of this node.
        """
        case = self._cases.get(run)
        if case is None:
            return None
        report = case.report()
        past = list(case.reports.past)
        return Judgement(by, self._open(case), past, report, compared_ranks(report))


def _past(case: RunCase) -> list[dict[str, Any]]:
    """The closed verdicts on a run: this agent's, and those of an agent that leads the run now."""
    own, judgement = list(case.reports.past), case.judgement
    return own if judgement is None else [*own, *(dict(each) for each in judgement.past)]
