"""Keeps the histories of the runs of a node: collects in the agent's loop, writes in a thread."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_ddp import __version__, errors, files
from otel_ddp.agent.history.kept_run import Batch, KeptRun, Sample, State
from otel_ddp.agent.history.run_time import ProcessTime, Told
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.reading.process import Process
from otel_ddp.history import directory
from otel_ddp.history.run_file import Unusable
from otel_ddp.history.tables import RunKey, SeriesKey
from otel_ddp.journal.process_state import rank_key
from otel_ddp.vocabulary import catalog
from otel_ddp.vocabulary.catalog import Kind
from otel_ddp.vocabulary.words import NODE_LABELS, RANK_LABELS, TIME_CAUSES, state_word

if TYPE_CHECKING:
    from otel_ddp.agent.history.incoming import Incoming
    from otel_ddp.agent.history.outgoing import Outgoing

log = logging.getLogger("otel_ddp.agent")

_WRITE_EVERY_S = 1.0
# Writing takes this share of a core, unless it would then wait for longer, as after a failure. Each
# curve has a page of the file of its own: what thousands of curves cost depends on how often they
# are written to.
_WRITING_SHARE, _WRITE_SELDOM_S = 0.02, 5.0
_CLEAN_EVERY_S = 60.0
_CLOSE_AFTER_S = 30.0
_STOP_S = 5.0
# A disk that has not answered for so long is said to hang; one that is slow has then answered.
_HANGS_S = 4.0
# Records and steps that wait while the disk does not answer; beyond it they are left out.
_MOST_QUEUED = 300_000


class _Waiting:
    """What the thread has not taken yet. The agent's loop adds to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: list[Batch] = []
        self._states: dict[RunKey, State] = {}
        self._size = 0
        self._left_out_since_ns = 0

    def add(self, batch: Batch) -> None:
        size = batch.news.size
        with self._lock:
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

    def take(self) -> tuple[list[Batch], dict[RunKey, State], int]:
        """Batches, states, and since when something was left out; 0: nothing was."""
        with self._lock:
            taken = self._batches, self._states, self._left_out_since_ns
            self._batches, self._states, self._left_out_since_ns = [], {}, 0
            self._size = 0
        return taken


class _Pace:
    """When to write: each second, unless that takes too much of a core, or the last time failed."""

    def __init__(self) -> None:
        self._due_at = self._began_s = 0.0

    def is_due(self) -> bool:
        return time.monotonic() >= self._due_at

    def begin(self) -> None:
        """The thread writes from now on."""
        self._began_s = time.thread_time()

    def end(self, failed: bool) -> None:
        """It has written."""
        took = time.thread_time() - self._began_s
        pause_s = _WRITE_SELDOM_S if failed else min(took / _WRITING_SHARE, _WRITE_SELDOM_S)
        self._due_at = time.monotonic() + pause_s


class _Disk:
    """How the disk of the histories answers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._problem = ""
        self._problem_since_ns = 0
        # When it was asked for what it has not answered yet: by two clocks.
        self._asked: tuple[float, int] | None = None
        self._failed_slowly = False

    def attempt(self, ask: Callable[[], None]) -> str:
        """Why it failed; empty if it did not."""
        began, _ = self._asked = time.monotonic(), time.time_ns()
        try:
            ask()
        except (sqlite3.Error, OSError, Unusable, OverflowError, ValueError) as why:
            # SQLite tries for ten seconds where a file system has no locks.
            self._failed_slowly |= time.monotonic() - began > _HANGS_S
            return getattr(why, "strerror", None) or str(why) or type(why).__name__
        finally:
            self._asked = None
        return ""

    def hangs(self) -> bool:
        """Whether a thread that touches it may wait for long."""
        asked = self._asked
        return self._failed_slowly or (asked is not None and time.monotonic() - asked[0] > _HANGS_S)

    def problem(self) -> tuple[str, int]:
        """Why nothing can be kept, and since when; empty if all is well."""
        asked = self._asked
        if asked is not None and time.monotonic() - asked[0] > _HANGS_S:
            return "the disk does not answer", self._problem_since_ns or asked[1]
        return self._problem, self._problem_since_ns

    def note(self, failed: str, now_ns: int) -> None:
        """How the last round went."""
        self._failed_slowly = self._failed_slowly and bool(failed)
        if failed and not self._problem:
            self._problem_since_ns = now_ns
            log.warning("no history is kept in %s: %s", self._folder, failed)
        elif self._problem and not failed:
            self._problem_since_ns = 0
            log.info("histories are kept in %s again", self._folder)
        self._problem = failed


class Histories:
    """One a node. The agent's loop feeds it; only its thread touches a file."""

    def __init__(self, named: str, most_bytes: int, node: str) -> None:
        """*named*: the directory, if the user named one. *most_bytes*: 0 keeps nothing."""
        self.directory = directory.default_directory(named)
        self.keeps = most_bytes > 0
        self._most_bytes = most_bytes
        self._node = node
        self._waiting = _Waiting()
        self._disk = _Disk(self.directory)
        self._wake = threading.Event()
        self._stopping = False
        # By run; and when it was fed last.
        self._runs: dict[RunKey, tuple[KeptRun, float]] = {}
        # Of runs of several nodes: what goes to their leads, and what comes where we lead.
        self._outgoing: dict[RunKey, Outgoing] = {}
        self._incoming: Incoming | None = None
        self._led_by: dict[RunKey, str] = {}
        self._clean_at = 0.0
        self._pace = _Pace()
        self.thread = KeptThread("history", self._work)

    # -- called by the agent's loop

    def feed(self, batch: Batch) -> None:
        """What was read of a process."""
        self._waiting.add(batch)

    def feed_states(self, states: Mapping[RunKey, State]) -> None:
        """What is known of each run now."""
        self._led_by = {run: node for run, node in self._led_by.items() if run in states}
        self._waiting.add_states(states)
        self._wake.set()

    def parts_for_lead(self, run: RunKey, node: str, start: str, shift_ns: int) -> list[bytes]:
        """What the lead of a run has to know next; where it writes into our folder, nothing.

        *node*: the lead's. *start*: which start of its agent it is. *shift_ns*: its clock minus
        ours.
        """
        if not self.keeps:
            return []
        self._led_by[run] = node
        found = self._outgoing.get(run)
        if found is None or found.start != start:
            from otel_ddp.agent.history.outgoing import Outgoing

            path = self.directory / directory.file_name(*run, node)
            found = self._outgoing[run] = Outgoing(path, start)
        return found.take(shift_ns)

    def led_by(self, run: RunKey) -> str:
        """The node whose agent keeps all of the run, or did so last; empty: this one."""
        return self._led_by.get(run, "")

    def leave_lead(self, run: RunKey) -> None:
        """The run has no lead on another node any more."""
        self._outgoing.pop(run, None)

    def take_parts(self, run: RunKey, node: str, parts: Sequence[bytes]) -> None:
        """What another node has sent of a run that this agent leads."""
        if self.keeps and parts and node != self._node:
            from otel_ddp.agent.history.incoming import Incoming

            self._incoming = self._incoming or Incoming(self.directory, self._most_bytes // 2)
            self._incoming.take(run, node, parts)

    def describe(self) -> dict[str, Any]:
        """Where histories are, and since when nothing could be kept, if that is so."""
        problem, since_ns = self._disk.problem()
        where = str(self.directory) if self.keeps else ""
        return {"directory": where, "problem": problem, "since_ns": since_ns}

    def times(self) -> dict[RunKey, Told]:
        """What the time of each run's ranks here went to, as last written."""
        found = {key: run.time.told for key, (run, _) in [*self._runs.items()]}
        return {key: told for key, told in found.items() if told is not None}

    def hang(self) -> bool:
        """Whether a thread that touches the directory may wait for long."""
        return self._disk.hangs()

    def remark(self) -> str:
        """One line on why nothing is kept now; empty if all is well."""
        problem, _ = self._disk.problem()
        return f"no history is kept: {problem}" if problem else ""

    def stop(self) -> None:
        """Write what waits, for a few seconds at most."""
        self._stopping = True
        self._wake.set()
        if self.thread.join(1.0 if self.remark() else _STOP_S):
            for run, _ in self._runs.values():
                run.close()
            if self._incoming is not None:
                self._incoming.close()

    # -- the thread

    def _work(self) -> None:
        while not self._stopping:
            self._wake.wait(_WRITE_EVERY_S)
            self._wake.clear()
            if self._pace.is_due():
                self._write_all()
        self._write_all()

    @errors.contained()
    def _write_all(self) -> None:
        now_ns, now = time.time_ns(), time.monotonic()
        self._pace.begin()
        batches, states, left_out_since_ns = self._waiting.take()
        for key, state in states.items():
            self._run(key, now).time.learn(state.processes)
        for batch in batches:
            self._run(batch.run, now).feed(batch)
        for key, state in states.items():
            self._run(key, now).feed_state(state)
        failed = self._disk.attempt(lambda: files.make_kept(self.directory))
        for key, (run, fed_at) in list(self._runs.items()):
            if left_out_since_ns:
                run.leave_out(left_out_since_ns, now_ns, "the disk did not answer in time")
            run.outgoing = self._outgoing.get(key)
            failed = self._disk.attempt(partial(run.write, now_ns)) or failed
            if now - fed_at > _CLOSE_AFTER_S and not run.waits:
                self._disk.attempt(run.close)
                del self._runs[key]
        if self._incoming is not None and not failed:
            self._disk.attempt(partial(self._incoming.write, now))
        self._pace.end(bool(failed))
        self._disk.note(failed, now_ns)
        if now >= self._clean_at and not failed:
            self._clean_at = now + _CLEAN_EVERY_S
            keep = {run.path for run, _ in self._runs.values()}
            if self._incoming is not None:
                keep |= self._incoming.paths()
            delete = directory.delete_oldest
            self._disk.attempt(lambda: delete(self.directory, self._most_bytes, keep))

    def _run(self, key: RunKey, now: float) -> KeptRun:
        found = self._runs.get(key)
        run = found[0] if found else KeptRun(self.directory / directory.file_name(*key, self._node))
        if found is None:
            # How wide its buckets are, and how far it has read: known before anything is summed up.
            self._disk.attempt(run.open)
        self._runs[key] = run, now
        return run


# -- what is kept

# Of a rank, beside its steps and phases, which have series.
_TOTALS = frozenset(
    metric.name
    for metric in (
        *(catalog.TRAINING_STEPS, catalog.TRAINING_STEPS_SKIPPED, catalog.TRAINING_SAMPLES),
        *(catalog.TRAINING_TOKENS, catalog.TRAINING_GC_TIME, catalog.TRAINING_FLOPS),
        *(catalog.TRAINING_OOMS, catalog.OTEL_DDP_HOOK_TIME, catalog.OTEL_DDP_HOOK_ERRORS),
        catalog.TRAINING_STEP_DURATION,
    )
)

# What a person looks at; the others are on /metrics and in Prometheus.
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
    catalog.PROCESS_CPU_TIME,
    catalog.SYSTEM_CPU_UTILIZATION,
    catalog.SYSTEM_MEMORY_USAGE,
    catalog.SYSTEM_MEMORY_LIMIT,
    catalog.SYSTEM_DISK_IO,
    catalog.SYSTEM_NETWORK_IO,
)


class Collector:
    """Called from the agent's loop."""

    def __init__(self, histories: Histories, ledger: Ledger, node: str) -> None:
        self._histories = histories
        self._ledger = ledger
        self._node = node
        # The role of the first process that was seen of a run.
        self._job_types: dict[RunKey, str] = {}
        # What this process had needed at the last look.
        self._cpu_s = 0.0

    def feed(self, feeds: Iterable[Process]) -> None:
        """What the last poll has read: of a rank's processes the earlier first."""
        for each in sorted(feeds, key=lambda e: e.reader.created_ns):
            new = each.new if each.exported else each.new._replace(scalars=[])
            if each.labels and any(new):
                key, rank = self._key_and_rank(each)
                reader = each.reader
                of = (key, rank, reader.path.name, reader.created_ns, _started_ns(each))
                self._histories.feed(Batch(*of, _launched_by(each), reader.names, new))

    def feed_states(
        self,
        feeds: Iterable[Process],
        verdicts: Sequence[Mapping[str, Any]],
    ) -> None:
        """What is known now. The caller holds the ledger's lock."""
        feeds = [each for each in feeds if each.labels]
        taken = list(_samples(self._ledger))
        states = {}
        for key in dict.fromkeys(self._key_and_rank(each)[0] for each in feeds):
            of_run = [each for each in feeds if self._key_and_rank(each)[0] == key]
            states[key] = self._state(key, of_run, verdicts, taken)
        # One agent serves all runs of a node: the living ones share its processor time.
        cpu_s, self._cpu_s = time.process_time() - self._cpu_s, time.process_time()
        living = [key for key, state in states.items() if not state.has_ended]
        for key in living:
            states[key] = states[key]._replace(agent_cpu_s=cpu_s / len(living))
        self._histories.feed_states(states)
        self._update_time(states)
        self._job_types = {key: each for key, each in self._job_types.items() if key in states}

    def _update_time(self, present: Collection[RunKey]) -> None:
        now_ns = time.time_ns()
        ((_, shown),) = self._ledger.of((catalog.OTEL_DDP_RUN_ATTEMPTS,))
        is_shown = {each.labels for each in shown}
        for run, told in self._histories.times().items():
            labels = tuple(zip(NODE_LABELS, (*run, self._node), strict=True))
            # The last of a run is written when its journals are closed; not when it is forgotten.
            if run not in present and labels not in is_shown:
                continue
            many = float(told.attempts)
            self._ledger.put(catalog.OTEL_DDP_RUN_ATTEMPTS, labels, many, now_ns, told.began_ns)
            # All of them: a series that began above 0 would have no rate.
            for cause in TIME_CAUSES:
                where, spent_s = (*labels, ("cause", cause)), told.seconds.get(cause, 0.0)
                self._ledger.put(catalog.OTEL_DDP_RUN_TIME, where, spent_s, now_ns, told.began_ns)

    def _key_and_rank(self, feed: Process) -> tuple[RunKey, str]:
        labels = dict(feed.labels)
        key = labels["group"], labels["run"]
        job_type = labels["job_type"]
        of_run = self._job_types.setdefault(key, job_type)
        return key, rank_key(labels["rank"], job_type, of_run)

    def _state(
        self,
        key: RunKey,
        feeds: Sequence[Process],
        verdicts: Sequence[Mapping[str, Any]],
        taken: Sequence[Sample],
    ) -> State:
        ranks: dict[str, dict[str, Any]] = {}
        about: dict[str, Any] = {"group": key[0], "run": key[1], "job_type": self._job_types[key]}
        # The newest process of a rank describes it.
        for each in sorted(feeds, key=lambda e: e.reader.created_ns):
            totals = _totals(each)
            ranks[self._key_and_rank(each)[1]] = {**each.describe().to_json(), "totals": totals}
            if each.identity.get("global_rank") == 0:
                about |= self._about(each)
        own = [each for each in verdicts if _is_of(each, key)]
        alive = any(each.ended_at is None for each in feeds)
        if not alive:
            # An agent that comes later has not seen the run until now.
            about["seen_ns"] = max(each.life.ended_ns for each in feeds)
        here = [each for each in taken if each.run == key or (each.run is None and alive)]
        about |= {
            "node": self._node,
            "version": __version__,
            "began_ns": min(each.reader.created_ns for each in feeds),
            "led_by": self._histories.led_by(key),
        }
        processes = [
            ProcessTime(
                self._key_and_rank(each)[1],
                each.reader.created_ns,
                _started_ns(each),
                each.life.ended_ns,
                state_word(each.life.state),
                None if (progress := each.reader.progress()) is None else progress.step,
                _launched_by(each),
            )
            for each in sorted(feeds, key=lambda e: e.reader.created_ns)
        ]
        return State(about, ranks, own, here, processes)

    def _about(self, feed: Process) -> dict[str, Any]:
        return {
            "project": feed.project,
            "config": dict(feed.reader.config),
            "texts": feed.description.texts(),
            "environment": feed.description.environment(),
            "summary": feed.summary(),
        }


def _started_ns(feed: Process) -> int:
    """When the process started, if a launcher has started it for this run; else its journal.

    A notebook and a pool's worker have been there for longer than their run.
    """
    created_ns, ticks = int(feed.reader.created_ns), int(feed.reader.start_ticks)
    if feed.identity.get("launcher") in ("", None, "lone", "pool", "spawn") or not ticks:
        return created_ns
    booted_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return min(booted_ns + ticks * 10**9 // os.sysconf("SC_CLK_TCK"), created_ns)


def _launched_by(feed: Process) -> str:
    return str(feed.identity.get("launched_by") or "")


def _totals(feed: Process) -> dict[str, float]:
    found: dict[str, float] = {}
    for total in feed.reader.totals():
        if total.metric in _TOTALS:
            found[total.metric] = found.get(total.metric, 0.0) + total.values[0]
    return found


def _is_of(verdict: Mapping[str, Any], key: RunKey) -> bool:
    who = verdict["who"]
    return (who.get("group"), who.get("run")) == key


def _samples(ledger: Ledger) -> Iterator[Sample]:
    """The readings as they are now. The caller holds the ledger's lock."""
    for metric, of_metric in ledger.of(_METRICS):
        kind = "counter" if metric.kind is Kind.COUNTER else "node"
        for series in of_metric:
            value = series.value
            if not isinstance(value, (int, float)):
                continue
            labels = dict(series.labels)
            run = (labels["group"], labels["run"]) if labels.get("run") else None
            more = tuple(pair for pair in series.labels if pair[0] not in RANK_LABELS)
            key = SeriesKey(kind, metric.name, labels.get("rank", ""), more)
            yield Sample(run, key, series.time_ns, float(value))
