"""The node agent: reads the journals, samples the node, judges, writes the ledger, exports."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import time
from typing import TYPE_CHECKING, Any

from otel_ddp import __version__, catalog, files, settings
from otel_ddp.agent import startup, wakeup
from otel_ddp.agent.artifacts.artifacts import Artifacts
from otel_ddp.agent.export.exporter import Exporter
from otel_ddp.agent.history.collect import Collector
from otel_ddp.agent.history.histories import Histories
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.node.gpu import drivers
from otel_ddp.agent.node.sampling import Sampling
from otel_ddp.agent.reading.journals import Journals
from otel_ddp.agent.verdicts import postmortem, stack_survey
from otel_ddp.agent.verdicts.ended_by_parent import Parents
from otel_ddp.agent.verdicts.exit_causes import ExitCauses
from otel_ddp.agent.verdicts.judge import Judge
from otel_ddp.agent.verdicts.silent_ranks import SilentRanks
from otel_ddp.diagnosis.verdict import run_labels
from otel_ddp.errors import ConfigError
from otel_ddp.journal import agent_environment
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import Document

if TYPE_CHECKING:
    from otel_ddp.agent.scrape.endpoint import Endpoint
    from otel_ddp.history.page.app import App

log = logging.getLogger("otel_ddp.agent")

_SERIES_EVERY_S = 1.0
_CONNECT_EVERY_S = 15.0
_STATUS_EVERY_S = 5.0
_BROKEN_HOLD_S = 10.0


class Agent:
    """One a place. `run` is its whole life."""

    def __init__(
        self,
        place: Place,
        conf: settings.Settings,
        lock: int,
        foreground: bool = False,
        *,
        keeps_found: bool = False,
        ended_before: str = "",
    ) -> None:
        """*keeps_found*: as in Journals. *ended_before*: the error that ended the agent before."""
        self.place = place
        self.conf = conf
        self.foreground = foreground
        self.ledger = Ledger()
        host = socket.gethostname()
        self.node = conf.node or host
        self.exit_causes = ExitCauses()
        self.parents = Parents(self.exit_causes)
        self.journals = Journals(
            *(place, self.ledger, conf.node, self.parents.ended_well),
            keeps_found=keeps_found,
            devices=lambda: self.sampling.describe(),
        )
        self.histories = Histories(conf.history_directory, conf.history_bytes, self.node)
        self._collector = Collector(self.histories, self.ledger, self.node)
        self.artifacts = Artifacts(conf, place, self.ledger, self.node, of_platform=foreground)
        self.sampling = Sampling(self.ledger, self.node, conf.sources, drivers.known())
        self.judge = Judge(
            self.ledger,
            conf.stall_timeout_s,
            postmortem.directory(conf.postmortem_directory),
            self.exit_causes,
            grafana=conf.grafana_url,
            gpus=self.sampling.gpus,
            cores=self.sampling.cores,
            before=startup.verdicts_before(place),
        )
        self.silent_ranks = SilentRanks()
        self.exporter = Exporter(
            conf, place, self.ledger, self.journals, self._documents, self.node, host
        )
        self.environment = agent_environment.digest(os.environ, offline=conf.offline)
        self._lock = lock
        self._stop_reason = ""
        self._doorbell = -1
        self._started_ns = time.time_ns()
        self._busy_at = self._round_began_at = time.monotonic()
        self._status_written: tuple[float, bytes] = (0.0, b"")
        self._endpoint: Endpoint | None = None
        self._remark = ""
        self._ended_before = (
            f"the agent before this one was ended by an error ({ended_before}; {place.agent_log})"
            if ended_before
            else ""
        )
        self._left_place = False
        self._update_at = self._export_at = self._connect_at = 0.0

    # -- life

    def run(self) -> None:
        """Work until a signal ends it, or until no process is left to watch."""
        self._doorbell = wakeup.open_doorbell(self.place.doorbell)
        self._stop_at_signals()
        self.journals.delete_unfinished()
        self.journals.find()
        self._serve()
        self.sampling.start()
        self.exporter.connect()
        self.place.delay_start(0.0)
        self._write_status()
        log.info("serving %s; OTLP: %s", self._url() or "nothing", self.exporter.describe())
        self._connect_at = time.monotonic() + _CONNECT_EVERY_S
        try:
            while not self._stop_reason:
                self._round()
                self._sleep()
        finally:
            self._end()

    def _stop_at_signals(self) -> None:
        def stop(number: int, frame: object) -> None:
            self._stop_reason = f"stopped by {signal.Signals(number).name}"
            self.place.wake_agent()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, stop)

    def _sleep(self) -> None:
        if not self._stop_reason:
            # A death wakes us as well: the times then show which process died first.
            wakeup.wait(self._doorbell, self.exit_causes.handles())

    def _round(self) -> None:
        """Everything that is due, once."""
        self._round_began_at = time.monotonic()
        self._read_and_judge()
        if self.journals.has_unsubmitted_end():
            self._update_series()
            self.exporter.export_at_once()
        now = time.monotonic()
        if now >= self._update_at:
            self._update_at = now + _SERIES_EVERY_S
            self._update_series()
            for thread in self._threads():
                thread.keep_running()
            self._forget_ended()
            self._check_whether_to_stop()
            self._write_status()
        if now >= self._connect_at:
            self._connect_at = now + _CONNECT_EVERY_S
            self.exporter.connect()
        if now >= self._export_at:
            self._export_at = now + self.conf.interval_s
            self.exporter.export()
        if not (self.exporter.connected or self.exporter.failed_to_start):
            self.journals.commit(self.journals.marks())
        self._delete_done()

    def _end(self) -> None:
        log.info("leaving: %s", self._stop_reason or "an error")
        self.artifacts.stop()
        self._read_and_judge()
        self._update_series()
        if self.exporter.connected:
            self.exporter.export()
        elif not self.exporter.failed_to_start:
            self.journals.commit(self.journals.marks())
        self._delete_done()
        self.sampling.stop()
        self.histories.stop()
        if self._endpoint is not None:
            self._endpoint.stop()
        if self.exporter.connected:
            # A backend would show the last values for minutes more. How a run has ended is true
            # that long, and alerts look for it.
            with self.ledger.lock:
                self.ledger.end_all(self.journals.ended_runs())
            self.exporter.export()
            self.exporter.stop()
        if self._owns_lock():
            files.remove(self.place.agent_file, self.place.doorbell)

    # -- the flow

    def _read_and_judge(self) -> None:
        self.journals.find()
        self.journals.poll()
        self.artifacts.feed(self.journals.new_artifacts())
        if self.histories.keeps:
            self._collector.feed(self.journals.feeds())
        self.parents.watch(self.journals.feeds())
        self.judge.poll(self.journals.feeds())

    def _update_series(self) -> None:
        """Write into the ledger what is true now."""
        self._update_training_series()
        now_ns = time.time_ns()
        with self.ledger.lock:
            self.sampling.update_series(self.journals.ranks(), self.journals.pids(), now_ns)
            self._update_own_series(now_ns)
        self._update_histories()

    def _update_histories(self) -> None:
        if self.histories.keeps:
            past = [*self.judge.past_bounds(), *self.judge.past()]
            verdicts = [*past, *self.judge.verdicts()]
            with self.ledger.lock:
                self._collector.feed_states(self.journals.feeds(), verdicts)

    def _update_training_series(self) -> None:
        now_ns = time.time_ns()
        with self.ledger.lock:
            self.journals.update_series(now_ns)
            self.judge.update_series(now_ns)
            self.artifacts.update_series(now_ns, self.journals.labels())
        self.silent_ranks.poll(self.journals.feeds(), now_ns)

    def _update_own_series(self, now_ns: int) -> None:
        labels = (("node", self.node),)

        def put(metric: catalog.Metric, value: float, *more: tuple[str, str]) -> None:
            self.ledger.put(metric, (*labels, *more), float(value), now_ns, self._started_ns)

        put(catalog.OTEL_DDP_AGENT_CPU_TIME, time.process_time())
        status = self.exporter.status()
        if status is None:
            return
        put(catalog.OTEL_DDP_SPOOL_SIZE, status.spool_bytes)
        for outcome in ("delivered", "failed", "refused"):
            put(catalog.OTEL_DDP_EXPORTS, getattr(status, outcome), ("outcome", outcome))
        lost = {**status.dropped_points, "rejected": status.rejected_points}
        lost["history_full"] = self.ledger.points_dropped
        for why, count in lost.items():
            put(catalog.OTEL_DDP_POINTS_DROPPED, count, ("why", why))

    def _documents(self) -> list[tuple[Labels, str, list[Document]]]:
        """The spans and events that are new: of verdicts, and those of the journals."""
        return [
            *self.judge.flush_documents(),
            *self.artifacts.flush_documents(),
            *self.journals.flush_documents(),
        ]

    def _delete_done(self) -> None:
        """Delete the journals of dead processes once everything in them is exported."""
        done = self.journals.done()
        if done:
            # Once more, so that their series and histories show how they ended.
            self._update_training_series()
            self._update_histories()
            self.journals.close(done)
            # Before they are deleted: from here on only the agent's file describes them.
            self._write_status()
            self.journals.delete(done)

    def _forget_ended(self) -> None:
        self.journals.forget_ended(self.conf.linger_s)
        self.judge.retire({run_labels(labels) for labels in self.journals.labels()})

    # -- when to stop

    def _check_whether_to_stop(self) -> None:
        now = time.monotonic()
        environments = self.journals.environments()
        others = environments - {self.environment, ""}
        if self.journals.any_alive() or self.artifacts.busy():
            self._busy_at = now
        if not self._owns_lock() and self.journals.any_removed():
            self._go_on_without_place()
        elif not self._owns_lock():
            self._stop_reason = "the place or its lock was removed"
        elif self.foreground:
            pass
        elif others and environments == others:
            # One of these processes starts another agent, with its own variables.
            self._stop_reason = (
                "the processes that run now were started with other OTEL_* variables"
            )
        elif self.journals.is_empty() and now - self._busy_at >= self.conf.linger_s:
            self._stop_reason = f"no process has run for {self.conf.linger_s:g} s"
        # An agent in the foreground was given its variables on purpose.
        if others and not self._stop_reason and not self.foreground:
            self._remark = (
                "a process was started with other OTEL_* variables than the agent, which keeps "
                "those of the first one until that has ended"
            )

    def _go_on_without_place(self) -> None:
        # Open files outlive their names, as after a logout that clears a user's shared memory.
        if not self._left_place:
            self._left_place = True
            log.warning(
                "%s was removed: its processes are read and exported to their ends; others get "
                "another agent",
                self.place.directory,
            )
        self.journals.leave_place()

    def _owns_lock(self) -> bool:
        # If the lock file is deleted, a second agent may start: then this one ends.
        try:
            return os.stat(self.place.agent_lock).st_ino == os.fstat(self._lock).st_ino
        except OSError:
            return False

    # -- the endpoint and the status

    def _serve(self) -> None:
        from otel_ddp.agent.scrape import web_config
        from otel_ddp.agent.scrape.endpoint import Endpoint

        host, port = self.conf.scrape_host, self.conf.scrape_port
        try:
            rules = web_config.find(self.conf.web_config, host)
            self._endpoint = Endpoint(
                *(self.ledger, host, port, self._page()),
                idle_s=lambda: time.monotonic() - self._round_began_at,
                rules=rules,
                problems=self._problems,
            )
        except web_config.Refused as why:
            self._remark = f"no scrape endpoint: {why}"
        except OSError as error:
            self._remark = (
                f"no scrape endpoint: {host} cannot be bound ({error.strerror}): set "
                "OTEL_EXPORTER_PROMETHEUS_HOST to an address of this machine, or to 0.0.0.0"
            )
        if self._endpoint is None:
            log.warning("%s", self._remark)
            return
        self._endpoint.start()
        if port and self._endpoint.port != port:
            self._remark = f"port {port} is taken, so {self._endpoint.port} is used"

    def _page(self) -> App:
        from otel_ddp.history.page.app import App

        return App(
            self.histories.directory,
            ours=True,
            disk_hangs=self.histories.hang,
            live=self.status,
            ask_stacks=self._ask_stacks,
            recent=self.journals.recent,
            postmortem_folders=[postmortem.directory(self.conf.postmortem_directory)],
        )

    def _ask_stacks(self, group: str, run: str, rank: str) -> list[dict[str, Any]]:
        """The stacks of a run's processes, for the page; called in a thread of the endpoint."""
        ranks = [int(rank)] if rank.isdecimal() else None
        return [
            {
                "rank": each.rank,
                "pid": each.pid,
                "why": each.why_no_answer,
                "threads": [
                    {"name": name, "frames": [frame._asdict() for frame in frames]}
                    for name, frames in each.stacks
                ],
            }
            for each in stack_survey.ask(self.place.journals(), ranks)
            if (each.group or "", each.run) == (group, run)
        ]

    def _threads(self) -> list[KeptThread]:
        endpoint = [] if self._endpoint is None else [self._endpoint.thread]
        return [
            *endpoint,
            *self.sampling.threads(),
            *self.exporter.threads(),
            *self.artifacts.threads(),
            *([self.histories.thread] if self.histories.keeps else []),
        ]

    def _problems(self) -> list[str]:
        """What does not run, for /healthz."""
        found = [thread.problem for thread in self._threads() if thread.problem]
        found += filter(None, [self.histories.remark()])
        return [*found, self.exporter.describe()] if self.exporter.failed_to_start else found

    def _url(self) -> str | None:
        return None if self._endpoint is None else self._endpoint.url

    def status(self) -> dict[str, Any]:
        """What the agent's page shows."""
        return {**self._describe(), "processes": self.journals.describe()}

    def _describe(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "version": __version__,
            "node": self.node,
            "started_ns": self._started_ns,
            "scrape": self._url(),
            "export": self.exporter.describe(),
            "grafana": self.conf.grafana_url,
            "history": self.histories.describe(),
            "remark": "; ".join(filter(None, self._remarks())),
            "unreadable": self.journals.unreadable(),
            "nodes": self.journals.node_names(),
            "ended": [each.to_json() for each in self.journals.describe_ended()],
            "verdicts": self.judge.verdicts(),
            "past": self.judge.past(),
            "insufficient": self.judge.insufficient(),
            "notes": self.silent_ranks.notes(),
            **self.sampling.describe(),
        }

    def _remarks(self) -> list[str]:
        threads = [thread.problem for thread in self._threads()]
        return [
            *(self._ended_before, self._remark, self.journals.remark()),
            *(self.histories.remark(), *threads),
        ]

    def _write_status(self) -> None:
        """Write the agent's file if it has changed, and now and then to show that we run."""
        if self._left_place:
            return  # The file is another agent's by now.
        content = json.dumps(self._describe()).encode()
        written_at, written = self._status_written
        now = time.monotonic()
        unchanged = content == written and self.place.agent_file.exists()
        if unchanged and now - written_at < _STATUS_EVERY_S:
            return
        try:
            files.replace(self.place.agent_file, content)
        except OSError:
            return  # a full tmpfs: the status shows less, nothing else
        self._status_written = now, content


def main(directory: str = "", foreground: bool = False, insecure: bool = False) -> int:
    """Run the agent of a place to its end; the exit status."""
    startup.log_to_stderr()
    try:
        web_config = "insecure" if insecure else None
        conf = settings.read(directory=directory or None, web_config=web_config)
        place = startup.find_place(conf, foreground)
        lock = startup.lock_place(place)
    except (ConfigError, OSError) as error:
        log.error("%s", error)
        return 2
    # Before this one logs anything.
    ended_before = "" if foreground else place.last_error()
    if lock is None:
        if foreground:
            log.error("an agent already runs for %s", place.directory)
        return 1
    for doubt in settings.doubts(exports=not conf.offline):
        log.warning("%s", doubt)
    startup.raise_file_limit()
    if not foreground:
        startup.leave_training_alone()
    # From here on a process that finds no agent may start one at once; but an agent that breaks
    # at its start is not started again every few seconds.
    place.delay_start(_BROKEN_HOLD_S)
    if foreground:
        log.info("watching %s", place.directory)
    # A directory that a person names may hold copies of journals.
    keeps_found = foreground and bool(directory)
    agent = Agent(
        *(place, conf, lock, foreground), keeps_found=keeps_found, ended_before=ended_before
    )
    # The file of an agent that was killed is not true of this one.
    files.remove(place.agent_file)
    agent.run()
    place.delay_start(0.0)
    return 0
