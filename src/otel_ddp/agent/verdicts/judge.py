"""Judges the runs of this node: feeds their detectors, polls them, and reports what they find."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.reading.journal_feed import JournalFeed
from otel_ddp.agent.verdicts.exit_causes import ExitCauses
from otel_ddp.agent.verdicts.process_case import ProcessCase
from otel_ddp.agent.verdicts.reports import VerdictReporter
from otel_ddp.agent.verdicts.run_case import RunCase
from otel_ddp.agent.verdicts.verdict_series import VerdictSeries
from otel_ddp.diagnosis.core_evidence import Cores
from otel_ddp.diagnosis.gpu_evidence import Gpu
from otel_ddp.diagnosis.verdict import Labels, run_labels
from otel_ddp.errors import containment
from otel_ddp.journal.reader import Document
from otel_ddp.words import NODE_LABELS

_POLL_EVERY_NS = 500_000_000
_WATCH_EVERY_NS = 2_000_000_000
_MEMORY_EVERY_NS = 10_000_000_000
_MOST_SHOWN = 100


class Judge:
    """One per node. Called from the agent's loop alone, with the journals it has just read."""

    def __init__(
        self,
        ledger: Ledger,
        floor_s: float,
        postmortems: Path,
        causes: ExitCauses,
        *,
        grafana: str = "",
        clock: Callable[[], int] = time.monotonic_ns,
        gpus: Callable[[], Sequence[Gpu]] = tuple,
        cores: Callable[[], Cores] = dict,
        before: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """*floor_s*: the shortest stall limit; *gpus*: the node's devices as known now.

        *grafana*: the address that verdicts lead to, if any. *cores*: for how long the ranks have
        waited for a core lately. *before*: the open verdicts of an agent that was killed.
        """
        self._ledger = ledger
        self._clock = clock
        self._floor_s = floor_s
        self._cases: dict[Labels, RunCase] = {}
        self._processes: dict[JournalFeed, ProcessCase] = {}
        self._causes = causes
        self._cores = cores
        self._poll_at = self._watch_at = 0
        # All times in verdicts are on this clock: it is set once, and then goes on without jumps.
        self._origin_ns = time.time_ns() - clock()
        self._reporter = VerdictReporter(ledger, postmortems, grafana, gpus, before)
        self._series = VerdictSeries(ledger, self._origin_ns)

    @containment.contained()
    def poll(self, journals: Iterable[JournalFeed]) -> None:
        """Feed what is new in the journals to the detectors, and report what they find."""
        now_ns = self._now_ns()
        known = [each for each in journals if each.labels and not each.is_proxy]
        # Of two processes with the same labels, the newer one counts.
        known.sort(key=lambda each: each.reader.created_ns)
        for closed in self._processes.keys() - set(known):
            self._processes.pop(closed)
        ended = False
        for journal in known:
            ended |= self._feed(journal)
        processes = [self._processes[each] for each in known if each in self._processes]
        if now_ns >= self._watch_at:
            self._watch_at = now_ns + _WATCH_EVERY_NS
            for process in processes:
                if process.is_at_work:
                    self._watch(process, now_ns)
        if ended or now_ns >= self._poll_at:
            self._poll_at = now_ns + _POLL_EVERY_NS
            for case in list(self._cases.values()):
                of_run = [each for each in processes if run_labels(each.journal.labels) == case.run]
                self._poll_case(case, of_run, now_ns)

    def _now_ns(self) -> int:
        return self._origin_ns + self._clock()

    @containment.contained()
    def _watch(self, process: ProcessCase, now_ns: int) -> None:
        """Note what can only be read while the process lives, and what changes slowly."""
        self._causes.watch(*process.process)
        case = self._cases[run_labels(process.labels)]
        case.nonfinite.feed(process.labels, process.values.find(now_ns))
        if now_ns >= process.memory_at:
            process.memory_at = now_ns + _MEMORY_EVERY_NS
            if (memory := self._causes.memory(*process.process)) is not None:
                case.creep.set_limit(process.labels, memory.limit_bytes)
                case.creep.feed(process.labels, memory.private_bytes, now_ns)

    @containment.contained(default=False)
    def _feed(self, journal: JournalFeed) -> bool:
        """Feed what is new of a process; whether it has ended since the last poll."""
        process = self._known_process(journal)
        labels = process.labels
        case = self._case(labels)
        case.drop_ended_before(journal.reader.created_ns)
        steps, device_steps = journal.new.steps, journal.new.device_steps
        if process.is_at_work:
            case.update_world(labels, journal, trains=bool(steps) or journal.restarted)
        if not case.is_beside(journal.world_size):
            if process.is_at_work:
                case.stragglers.add_rank(labels)
            case.update_waits_known(labels, journal)
            case.update_own_collectives(labels, journal)
            case.update_clock(labels, journal)
            if steps:
                case.feed_steps(labels, journal, steps, self._now_ns())
            if device_steps:
                case.feed_device_steps(labels, device_steps)
        ended = not process.is_at_work and not process.end_is_known
        if ended:
            # The last values that it logged may be why.
            values = process.values.find(self._now_ns(), ended=True)
            case.nonfinite.feed(labels, values)
        return ended

    def _known_process(self, journal: JournalFeed) -> ProcessCase:
        """The process of this journal; a new one where its labels have changed."""
        process = self._processes.get(journal)
        if process is not None and process.labels == journal.labels:
            return process
        if process is not None:
            before = self._cases.get(run_labels(process.labels))
            if before is not None:
                before.remove(process.labels)
        process = self._processes[journal] = ProcessCase(journal)
        self._causes.watch(*process.process)
        return process

    def _case(self, labels: Labels) -> RunCase:
        run = run_labels(labels)
        case = self._cases.get(run)
        if case is None:
            case = self._cases[run] = RunCase(
                run, self._floor_s, self._causes, self._origin_ns, self._cores
            )
        if not case.node:
            # The first process decides: with two nodes on one host the series would jump.
            case.node = tuple(pair for pair in labels if pair[0] in NODE_LABELS)
        return case

    def _poll_case(self, case: RunCase, processes: list[ProcessCase], now_ns: int) -> None:
        journals = [each.journal for each in processes]
        # All detectors are polled before the first report: post-mortems list the other findings.
        for change in case.poll(processes, now_ns):
            self._reporter.report(case, change, journals, now_ns)
        for verdict in case.present():
            self._reporter.update(case, verdict, journals)

    def flush_documents(self) -> list[tuple[Labels, str, list[Document]]]:
        """The spans and events that have not been exported yet."""
        return self._reporter.flush_documents()

    def update_series(self, now_ns: int) -> None:
        """Write into the ledger what is true now. The caller holds the ledger's lock."""
        for case in self._cases.values():
            self._series.update_series(case, now_ns)

    def retire(self, runs: set[Labels]) -> None:
        """Forget all runs but these."""
        for run in [each for each in self._cases if each not in runs]:
            case = self._cases.pop(run)
            case.exits.forget_all()
            with self._ledger.lock:
                self._ledger.drop(case.run)

    # -- for the status

    def verdicts(self) -> list[dict[str, Any]]:
        """The open verdicts."""
        # The endpoint's threads call this too while the loop goes on, so each list is a copy.
        cases = list(self._cases.values())
        open_ones = [
            self._reporter.plain(each) for case in cases for each in list(case.verdicts.values())
        ]
        return open_ones[-_MOST_SHOWN:]

    def past(self) -> list[dict[str, Any]]:
        """The verdicts that are over, as long as their runs are shown."""
        past = [each for case in list(self._cases.values()) for each in list(case.past)]
        return past[-_MOST_SHOWN:]

    def past_bounds(self) -> list[dict[str, Any]]:
        """What has bounded the runs; harmless, so that only their histories tell it."""
        past = [each for case in list(self._cases.values()) for each in list(case.past_bounds)]
        return past[-_MOST_SHOWN:]

    def insufficient(self) -> list[dict[str, str]]:
        """The runs whose ranks cannot be compared, and why."""
        return [
            {**dict(run), "why": case.report.insufficient}
            for run, case in list(self._cases.items())
            if case.report is not None and case.report.insufficient
        ]
