"""The histories of a node's runs: collected in the agent's loop, written by a thread."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from otel_ddp import __version__, errors, files
from otel_ddp.agent.history.kept_run import Batch, KeptRun, Sample, State
from otel_ddp.agent.history.run_time import ProcessTime, TimeSnapshot
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.reading.process import Process
from otel_ddp.history import directory
from otel_ddp.history.run_file import Unusable
from otel_ddp.history.tables import RunKey, SeriesKey
from otel_ddp.journal.process_state import rank_key
from otel_ddp.journal.sent import KEPT_TOTALS
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Kind
from otel_ddp.vocabulary.words import NODE_LABELS, RANK_LABELS, TIME_CAUSES, state_word

log = logging.getLogger("otel_ddp.agent")

_WRITE_EVERY_S = 1.0
# After each write the thread pauses, so that writing takes this share of its time. No pause is
# longer than this many seconds, not even after a failure. Each write rewrites the last block of
# each curve, so with thousands of curves the length of the pause determines the cost.
_WRITING_SHARE, _WRITE_SELDOM_S = 0.005, 5.0
_CLEAN_EVERY_S = 60.0
_CLOSE_AFTER_S = 30.0
_STOP_S = 5.0
# The disk counts as hanging if one operation takes longer than this.
_HANGS_S = 4.0
# Limit of records and steps that wait for a hanging disk; further ones are dropped.
_MOST_QUEUED = 300_000
# Limit of samples that another node has sent and that wait for the next update.
_MOST_SAMPLES = 10_000


class _Waiting:
    """Queues what the agent's loop hands over to the history thread: batches and snapshots."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: list[Batch] = []
        self._states: dict[RunKey, State] = {}
        self._size = 0
        self._left_out_since_ns = 0
        self.added = 0
        """The number of batches added so far, including dropped ones."""

    def add(self, batch: Batch) -> None:
        size = batch.news.size
        with self._lock:
            self.added += 1
            if self._size + size > _MOST_QUEUED:
                self._left_out_since_ns = self._left_out_since_ns or time.time_ns()
                return
            self._size += size
            self._batches.append(batch)

    def add_states(self, states: Mapping[RunKey, State]) -> None:
        with self._lock:
            for key, state in states.items():
                before = self._states.get(key)
                self._states[key] = state if before is None else state.after(before)

    def take(self) -> tuple[list[Batch], dict[RunKey, State], int, int]:
        """Take all batches and snapshots, the time of the first dropped batch (or 0), and
        `added`."""
        with self._lock:
            taken = self._batches, self._states, self._left_out_since_ns, self.added
            self._batches, self._states, self._left_out_since_ns = [], {}, 0
            self._size = 0
        return taken


class _Disk:
    """Runs disk operations. Remembers whether they fail or hang."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._problem = ""
        self._problem_since_ns = 0
        # When the current operation began, on the monotonic and on the wall clock; None if none is
        # running.
        self._asked: tuple[float, int] | None = None

    def attempt(self, ask: Callable[[], None]) -> str:
        """Run an operation; returns why it failed, or an empty text."""
        self._asked = time.monotonic(), time.time_ns()
        try:
            ask()
        except (sqlite3.Error, OSError, Unusable, OverflowError, ValueError) as why:
            return getattr(why, "strerror", None) or str(why) or type(why).__name__
        finally:
            self._asked = None
        return ""

    def hangs(self) -> bool:
        """Whether the current operation takes too long, so that the disk seems to hang."""
        asked = self._asked
        return asked is not None and time.monotonic() - asked[0] > _HANGS_S

    def problem(self) -> tuple[str, int]:
        """Why nothing is written, and since when; an empty text and 0 if writing works."""
        asked = self._asked
        if asked is not None and self.hangs():
            return "the disk does not answer", self._problem_since_ns or asked[1]
        return self._problem, self._problem_since_ns

    def note(self, failed: str, now_ns: int) -> None:
        """Store the result of a round of writing, and log if it differs from the last one."""
        if failed and not self._problem:
            self._problem_since_ns = now_ns
            log.warning("no history is kept in %s: %s", self._folder, failed)
        elif self._problem and not failed:
            self._problem_since_ns = 0
            log.info("histories are kept in %s again", self._folder)
        self._problem = failed


class Histories:
    """The histories of a node. The agent's loop feeds them; only their thread touches files."""

    def __init__(self, named: str, most_bytes: int, node: str) -> None:
        """*named*: the configured directory, or empty."""
        self.directory = directory.default_directory(named)
        self._most_bytes = most_bytes
        self._node = node
        self._waiting = _Waiting()
        self.disk = _Disk(self.directory)
        self._wake = threading.Event()
        self._stopping = False
        # By run: the open history, and the monotonic time at which it was last fed.
        self._runs: dict[RunKey, tuple[KeptRun, float]] = {}
        self._clean_at = self._write_at = 0.0
        self._written = 0
        self.thread = KeptThread("history", self._work)

    # -- called by the agent's loop

    def feed(self, batch: Batch) -> None:
        """Queue the records of a process."""
        self._waiting.add(batch)

    def feed_states(self, states: Mapping[RunKey, State]) -> None:
        """Queue a snapshot of each run."""
        self._waiting.add_states(states)
        self._wake.set()

    @property
    def fed(self) -> int:
        """The number of batches fed so far."""
        return self._waiting.added

    def has(self, fed: int) -> bool:
        """Whether the first *fed* batches are on disk.

        Also true while the disk fails, so that a broken disk does not stop the export.
        """
        return self._written >= fed or bool(self.remark())

    def positions(self, run: RunKey) -> Mapping[str, int] | None:
        """For each journal of a run, the offset up to which the history has the journal's records.

        None if the history is not open yet.
        """
        found = self._runs.get(run)
        written = None if found is None else found[0].written
        return {} if written is None and self.remark() else written

    def describe(self) -> dict[str, Any]:
        """The directory of the histories, and why writing to it fails, for `status`."""
        problem, since_ns = self.disk.problem()
        return {"directory": str(self.directory), "problem": problem, "since_ns": since_ns}

    def times(self) -> dict[RunKey, TimeSnapshot]:
        """For each run: the time that its ranks on this node have spent, by cause, as last
        written."""
        found = {key: run.time.snapshot for key, (run, _) in [*self._runs.items()]}
        return {key: spent for key, spent in found.items() if spent is not None}

    def remark(self) -> str:
        """One line on why no history is written; empty if histories are written."""
        problem, _ = self.disk.problem()
        return f"no history is kept: {problem}" if problem else ""

    def stop(self) -> None:
        """Write the queue, for a few seconds at most, and end the thread."""
        self._stopping = True
        self._wake.set()
        if self.thread.join(1.0 if self.remark() else _STOP_S):
            for run, _ in self._runs.values():
                run.close()

    # -- the thread

    def _work(self) -> None:
        while not self._stopping:
            self._wake.wait(_WRITE_EVERY_S)
            self._wake.clear()
            if time.monotonic() >= self._write_at:
                self._write_all()
        self._write_all()

    @errors.contained()
    def _write_all(self) -> None:
        now_ns, now, began_s = time.time_ns(), time.monotonic(), time.thread_time()
        batches, states, left_out_since_ns, fed = self._waiting.take()
        for key, state in states.items():
            self._run(key, now).learn(state)
        for batch in batches:
            self._run(batch.run, now).feed(batch)
        for key, state in states.items():
            self._run(key, now).feed_state(state)
        failed = self.disk.attempt(lambda: files.make_kept(self.directory))
        for key, (run, fed_at) in list(self._runs.items()):
            if left_out_since_ns:
                run.leave_out(left_out_since_ns, now_ns, "the disk did not answer in time")
            failed = self.disk.attempt(partial(run.write, now_ns)) or failed
            if now - fed_at > _CLOSE_AFTER_S and not run.failing[0]:
                self.disk.attempt(run.close)
                del self._runs[key]
        self._written = fed
        pause_s = (time.thread_time() - began_s) / _WRITING_SHARE
        self._write_at = time.monotonic() + min(
            _WRITE_SELDOM_S if failed else pause_s, _WRITE_SELDOM_S
        )
        self.disk.note(failed, now_ns)
        if now >= self._clean_at and not failed:
            self._clean_at = now + _CLEAN_EVERY_S
            keep = {run.path for run, _ in self._runs.values()}
            delete = directory.delete_oldest
            self.disk.attempt(lambda: delete(self.directory, self._most_bytes, keep))

    def _run(self, key: RunKey, now: float) -> KeptRun:
        found = self._runs.get(key)
        run = found[0] if found else KeptRun(self.directory / directory.file_name(*key, self._node))
        if found is None:
            # Open the file before adding anything: it tells which records it already has.
            self.disk.attempt(run.open)
        self._runs[key] = run, now
        return run


# -- collecting


# Sampled metrics that histories store for the page. All others are on /metrics only.
_METRICS = (
    catalog.HW_GPU_UTILIZATION,
    catalog.OTEL_DDP_GPU_MEM_CONTROLLER_UTILIZATION,
    catalog.HW_GPU_MEMORY_USAGE,
    catalog.HW_GPU_MEMORY_LIMIT,
    catalog.HW_POWER,
    catalog.HW_TEMPERATURE,
    catalog.OTEL_DDP_GPU_CLOCK_FREQUENCY,
    catalog.OTEL_DDP_GPU_THROTTLE_ACTIVE,
    catalog.OTEL_DDP_GPU_XID_ERRORS,
    catalog.TRAINING_DEVICE_MEMORY_ALLOCATED,
    catalog.PROCESS_MEMORY_USAGE,
    catalog.TRAINING_COLLECTIVE_STEP_WAIT,
    catalog.PROCESS_CPU_TIME,
    catalog.SYSTEM_CPU_UTILIZATION,
    catalog.SYSTEM_MEMORY_USAGE,
    catalog.SYSTEM_MEMORY_LIMIT,
    catalog.SYSTEM_DISK_IO,
    catalog.SYSTEM_NETWORK_IO,
)


class _Run:
    """What the collector knows about one run."""

    def __init__(self) -> None:
        self.job_type = ""
        """`train` if a process has this job type, else the job type of the first process."""
        self.led_by = ""
        """The lead's node, if an agent on another node leads (judges) the run; else empty."""
        self.samples: Sequence[Sample] = ()
        """The newest sample of each series."""
        self.nodes: dict[str, list[Sample]] = {}
        """If this agent leads the run: new samples from other nodes, by node."""


class Collector:
    """Collects records, snapshots and samples in the agent's loop, and queues them to be
    written."""

    def __init__(self, histories: Histories, ledger: Ledger, node: str) -> None:
        self._histories = histories
        self._ledger = ledger
        self._node = node
        self._runs: defaultdict[RunKey, _Run] = defaultdict(_Run)

    # -- runs on several nodes

    def take_readings(self, run: RunKey, node: str, found: Sequence[Sample]) -> None:
        """Add new samples of another node of a run that this agent leads."""
        nodes = self._runs[run].nodes
        nodes[node] = [*nodes.get(node, ()), *found][-_MOST_SAMPLES:]

    def positions(self, run: RunKey) -> Mapping[str, int] | None:
        """See `Histories.positions`."""
        return self._histories.positions(run)

    def readings(self, key: RunKey, lead: str) -> Sequence[Sample]:
        """This node's samples for the history of a run that the agent on node *lead* writes."""
        run = self._runs[key]
        run.led_by = lead
        return run.samples

    # -- collecting

    def feed(self, processes: Iterable[Process]) -> None:
        """Queue the records that the last poll has read, those of older processes first."""
        for each in self._kept_here(processes):
            new = each.new if each.exported else each.new._replace(scalars=[])
            if any(new) or each.reader.bookmark() != each.mark_before:
                key, rank = self._key_and_rank(each)
                reader, since = each.reader, each.mark_first[0] if each.is_here else 0
                process = _time_of(each, rank)
                batch = Batch(key, process, reader.position, reader.names, new, since)
                self._histories.feed(batch)

    def _kept_here(self, processes: Iterable[Process]) -> list[Process]:
        """The processes whose history this agent writes, older ones first.

        If a rank has a living process on this node, its processes on other nodes are left out, as
        they are of an earlier attempt.
        """
        kept = [each for each in processes if each.labels and each.is_kept]
        kept.sort(key=lambda each: each.began_ns)
        here = {self._key_and_rank(each) for each in kept if each.is_here and each.is_at_work}
        return [each for each in kept if each.is_here or self._key_and_rank(each) not in here]

    def feed_states(
        self, processes: Iterable[Process], verdicts: Sequence[Mapping[str, Any]]
    ) -> None:
        """Queue snapshots of all runs. The caller holds the ledger's lock."""
        kept = self._kept_here(processes)
        by_run: dict[RunKey, list[Process]] = {}
        for each in kept:
            by_run.setdefault(self._key_and_rank(each)[0], []).append(each)
        taken = list(_samples(self._ledger, self._node))
        states = {key: self._state(key, each, verdicts, taken) for key, each in by_run.items()}
        self._histories.feed_states(states)
        self._update_time(states)
        for key in self._runs.keys() - states.keys():
            del self._runs[key]

    def _update_time(self, present: Collection[RunKey]) -> None:
        now_ns = time.time_ns()
        ((_, shown),) = self._ledger.of((catalog.OTEL_DDP_RUN_ATTEMPTS,))
        is_shown = {each.labels for each in shown}
        for run, spent in self._histories.times().items():
            labels = tuple(zip(NODE_LABELS, (*run, self._node), strict=True))
            # The final times of a run are written after its journals are closed, so they are
            # exported even if the run has no process here. But if the run's series were dropped in
            # between, do not create them again.
            if run not in present and labels not in is_shown:
                continue
            many = float(spent.attempts)
            self._ledger.put(catalog.OTEL_DDP_RUN_ATTEMPTS, labels, many, now_ns, spent.began_ns)
            # Export a cause even while its time is 0: Prometheus' increase() misses the first value
            # of a series that begins above 0.
            for cause in TIME_CAUSES:
                where, spent_s = (*labels, ("cause", cause)), spent.seconds.get(cause, 0.0)
                self._ledger.put(catalog.OTEL_DDP_RUN_TIME, where, spent_s, now_ns, spent.began_ns)

    def _key_and_rank(self, feed: Process) -> tuple[RunKey, str]:
        labels = dict(feed.labels)
        key = labels["group"], labels["run"]
        run, job_type = self._runs[key], labels["job_type"]
        # The first process of a run may be an evaluator, so the job type `train` replaces its job
        # type.
        run.job_type = job_type if job_type == "train" else run.job_type or job_type
        return key, rank_key(labels["rank"], job_type, run.job_type)

    def _state(
        self,
        key: RunKey,
        processes: Sequence[Process],
        verdicts: Sequence[Mapping[str, Any]],
        taken: Sequence[Sample],
    ) -> State:
        run = self._runs[key]
        ranks: dict[str, dict[str, Any]] = {}
        about: dict[str, Any] = {"group": key[0], "run": key[1], "job_type": run.job_type}
        times: list[ProcessTime] = []
        since_ns: dict[str, int] = {}
        # The processes are in order of their start, so a rank is described by its newest process.
        for each in processes:
            rank = self._key_and_rank(each)[1]
            described = each.describe().to_json()
            ranks[rank] = {**described, "totals": _totals(each)}
            if each.is_here and each.identity.get("global_rank") == 0:
                about |= self._about(each)
            since_ns.setdefault(_node(each), each.began_ns)
            times.append(_time_of(each, rank))
        named = [(each, each["who"]) for each in verdicts]
        own = [each for each, who in named if (who.get("group"), who.get("run")) == key]
        alive = any(each.ended_at is None for each in processes)
        # A run was last seen at its end, which may be before this agent was started.
        ended_ns = max(each.life.ended_ns for each in processes)
        about["seen_ns"] = time.time_ns() if alive else ended_ns
        here = [each for each in taken if each.run == key or (each.run is None and alive)]
        run.samples = here
        came = [sample for found in run.nodes.values() for sample in found]
        run.nodes.clear()
        since_ns.pop("", None)
        about |= {
            "node": self._node,
            "version": __version__,
            "began_ns": processes[0].began_ns,
            "led_by": run.led_by,
        }
        if since_ns:
            about["nodes"] = since_ns
        return State(about, ranks, own, [*here, *came], times)

    def _about(self, feed: Process) -> dict[str, Any]:
        return {
            "project": feed.project,
            "config": dict(feed.reader.config),
            "texts": feed.description.texts(),
            "environment": feed.description.environment(),
            "summary": feed.summary(),
        }


def _node(process: Process) -> str:
    """The node of a process; empty for this node."""
    return "" if process.is_here else dict(process.labels)["node"]


def _time_of(process: Process, rank: str) -> ProcessTime:
    progress = process.reader.progress()
    return ProcessTime(
        rank=rank,
        began_ns=process.began_ns,
        started_ns=process.started_ns,
        ended_ns=process.life.ended_ns,
        state=state_word(process.life.state),
        step=None if progress is None else progress.step,
        launched_by=str(process.identity.get("launched_by") or ""),
        node=_node(process),
        journal=process.journal,
    )


def _totals(feed: Process) -> dict[str, float]:
    found: dict[str, float] = {}
    for total in feed.reader.totals():
        if total.metric in KEPT_TOTALS:
            found[total.metric] = found.get(total.metric, 0.0) + total.values[0]
    return found


def _samples(ledger: Ledger, node: str) -> Iterator[Sample]:
    """The current samples in the ledger. The caller holds the ledger's lock."""
    for metric, of_metric in ledger.of(_METRICS):
        kind = "counter" if metric.kind is Kind.COUNTER else "node"
        for series in of_metric:
            value = series.value
            if not isinstance(value, (int, float)):
                continue
            labels = dict(series.labels)
            run = (labels["group"], labels["run"]) if labels.get("run") else None
            own = (pair for pair in series.labels if pair[0] not in RANK_LABELS)
            key = SeriesKey(kind, metric.name, labels.get("rank", ""), (*own, ("node", node)))
            yield Sample(run, key, series.time_ns, float(value))
