"""The node agent: its start, its loop, and its end."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import socket
import time
from pathlib import Path

from otel_ddp import files, settings
from otel_ddp.agent.export.exporter import Exporter, folder_of
from otel_ddp.agent.front import Front
from otel_ddp.agent.node_watch import NodeWatch
from otel_ddp.agent.notify.notifier import Notifier
from otel_ddp.errors import ConfigError
from otel_ddp.history.terminal import printable
from otel_ddp.journal.place import LOG_FORM, Place, agent_digest, find
from otel_ddp.journal.survey import last_of_agent, leave
from otel_ddp.vocabulary import catalog

log = logging.getLogger("otel_ddp.agent")

_LOCK_PATIENCE_S = 3.0
# Seconds between two rounds of the agent's loop; the end of a process wakes it earlier. Each round
# begins with cold CPU caches: if there is little to read, an agent with half as many rounds uses a
# fifth less CPU time.
TICK_S = 0.5
# Run the garbage collector once there are this many new objects. See collect_garbage_less_often.
_MORE_OBJECTS = 10_000
_SERIES_EVERY_S = 1.0
_CONNECT_EVERY_S = 15.0
_BROKEN_HOLD_S = 10.0
_ENDS_WITHIN_S = 2.0


class Agent:
    """The agent of one journal directory. It lives as long as `run`."""

    def __init__(
        self,
        place: Place,
        conf: settings.Settings,
        lock: int,
        foreground: bool = False,
        *,
        keeps_found: bool = False,
    ) -> None:
        """*keeps_found*: see `Journals`."""
        self._place = place
        self._conf = conf
        self._foreground = foreground
        host = socket.gethostname()
        self._node = conf.node or host
        self._watch = NodeWatch(
            place, conf, self._node, of_platform=foreground, keeps_found=keeps_found
        )
        watch = self._watch
        self._exporter = Exporter(
            conf,
            place,
            watch.ledger,
            watch.journals.marks,
            watch.commit,
            watch.flush_documents,
            self._node,
            host,
        )
        self._notifier = Notifier(conf, folder_of("notify-", conf, place, self._node))
        self._front = Front(place, conf, self._node, watch, self._exporter, self._notifier)
        self._lock = lock
        self._stop_reason = ""
        self._doorbell = -1
        self._busy_at = time.monotonic()
        self._left_place = False
        # When each periodic task is due next, on the monotonic clock.
        self._due_at = dict.fromkeys(("series", "connect", "export"), 0.0)

    # -- life

    def run(self) -> None:
        """Run the agent's loop until a signal arrives, or until no process is left to watch."""
        self._doorbell = open_doorbell(self._place.doorbell)
        self._stop_at_signals()
        journals = self._watch.journals
        journals.find()
        self._front.serve()
        self._exporter.connect()
        self._place.delay_start(0.0)
        self._front.write_file()
        log.info("serving %s; OTLP: %s", self._front.url or "nothing", self._exporter.describe())
        self._due_at["connect"] = time.monotonic() + _CONNECT_EVERY_S
        try:
            while not self._stop_reason:
                self._round()
                if not self._stop_reason:
                    # The death of a process ends this wait at once. So the times at which deaths
                    # are noticed show which process died first.
                    wait(self._doorbell, self._watch.exit_causes.handles())
        finally:
            self._end()

    def _stop_at_signals(self) -> None:
        def stop(number: int, frame: object) -> None:
            self._stop_reason = f"stopped by {signal.Signals(number).name}"
            self._place.wake_agent()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, stop)

    def _is_due(self, what: str, every_s: float) -> bool:
        now = time.monotonic()
        if now < self._due_at[what]:
            return False
        self._due_at[what] = now + every_s
        return True

    def _round(self) -> None:
        """Do one round of the loop: everything that is due."""
        self._front.moved_at = time.monotonic()
        self._read_and_judge()
        an_end = self._watch.journals.has_undelivered_end()
        series = self._is_due("series", _SERIES_EVERY_S)
        export = self._is_due("export", self._conf.interval_s)
        if an_end or series:
            self._update_series()
        if series:
            for thread in self._front.threads():
                thread.keep_running()
            self._watch.forget_ended(self._conf.linger_s, self._notifier.ending)
            self._check_whether_to_stop()
        if self._is_due("connect", _CONNECT_EVERY_S):
            self._exporter.connect()
        if an_end or series or export:
            # Write the agent's file before the commit. The next agent does not read committed
            # records again: it takes the best values among them from this file.
            self._write_file()
        if an_end:
            self._exporter.export_at_once()
        elif export or (series and not self._exporter.connected):
            self._exporter.export()
        self._exporter.commit()
        self._delete_done()

    def _end(self) -> None:
        log.info("leaving: %s", self._stop_reason or "an error")
        watch, exporter = self._watch, self._exporter
        self._wait_for_ends()
        self._read_and_judge(leaving=True)
        watch.artifacts.stop()
        self._notifier.stop()
        self._update_series()
        self._write_file()
        exporter.export()
        watch.stop()
        exporter.commit()
        self._delete_done()
        self._front.stop()
        if exporter.connected:
            # Report all series as ended: otherwise backends show their last values for minutes.
            # Keep the series of ended runs, because alert rules query them.
            with watch.ledger.lock:
                watch.ledger.end_all(watch.journals.ended_runs())
            exporter.export()
            exporter.stop()
        if self._owns_lock():
            files.remove(self._place.doorbell)
            leave(self._place, self._front.state())

    def _wait_for_ends(self) -> None:
        """Wait a moment for the training processes to end too, so that their ends are reported.

        When a scheduler ends a job, it kills the ranks and the agent at the same time.
        """
        watch, until = self._watch, time.monotonic() + _ENDS_WITHIN_S
        while watch.links.any_at_work(watch.journals.processes()) and time.monotonic() < until:
            wait(self._doorbell, watch.exit_causes.handles())
            self._read_and_judge()

    # -- data

    def _read_and_judge(self, *, leaving: bool = False) -> None:
        watch = self._watch
        watch.read_and_judge()
        page = (self._front.url or "").removesuffix("/metrics")
        self._notifier.poll(watch.judge.cases(), watch.journals.processes(), page, leaving=leaving)

    def _update_series(self) -> None:
        """Update all series in the ledger."""
        self._watch.update_series()
        ledger, now_ns, node = self._watch.ledger, time.time_ns(), ("node", self._node)
        own = [(catalog.OTEL_DDP_AGENT_CPU_TIME, time.process_time(), ())]
        with ledger.lock:
            for metric, value, more in (*own, *self._exporter.counts()):
                ledger.put(metric, (node, *more), float(value), now_ns, self._front.started_ns)

    def _delete_done(self) -> None:
        """Delete the journals of dead processes once they are exported."""
        journals = self._watch.journals
        if done := journals.done():
            # Update series and histories once more, so that they show how these processes ended.
            self._watch.update_series()
            journals.close(done)
            # Write the agent's file before deleting journals: afterwards, only this file describes
            # the processes.
            self._write_file()
            journals.delete(done)

    def _write_file(self) -> None:
        # Don't write if the directory was removed: a file there now belongs to another agent.
        if not self._left_place:
            self._front.write_file()

    # -- when to stop

    def _check_whether_to_stop(self) -> None:
        now, journals, linger_s = time.monotonic(), self._watch.journals, self._conf.linger_s
        at_work = journals.any_alive() or self._watch.links.running_remotely()
        if at_work or self._notifier.busy() or self._exporter.busy():
            self._busy_at = now
        if not self._owns_lock():
            if journals.any_removed():
                self._go_on_without_place()
            else:
                self._stop_reason = "the place or its lock was removed"
        # An agent in the foreground does not stop on its own: its supervisor or user stops it.
        if self._foreground or self._stop_reason:
            return
        own = agent_digest(os.environ, offline=self._conf.offline)
        environments = journals.environments()
        others = environments - {own, ""}
        if others and environments == others:
            # End, although processes run: all of them have other OTEL_* variables than this agent,
            # and one of them will start an agent with theirs.
            self._stop_reason = (
                "the processes that run now were started with other OTEL_* variables"
            )
        elif journals.is_empty() and now - self._busy_at > linger_s:
            self._stop_reason = f"no process has run for {linger_s:g} s"
        elif others:
            self._front.remarks["variables"] = (
                "a process was started with other OTEL_* variables than the agent, which uses "
                "those of the first process until that has ended"
            )

    def _go_on_without_place(self) -> None:
        # A logout may delete the user's files in /dev/shm. The open journals remain readable, so go
        # on reading them.
        if not self._left_place:
            self._left_place = True
            log.warning(
                "%s was removed: its processes are read and exported to their ends; others get "
                "another agent",
                self._place.directory,
            )
        self._watch.journals.leave_place()

    def _owns_lock(self) -> bool:
        # Compare the lock file with the locked one: if it was deleted, another agent may have
        # started, with a lock file of its own.
        try:
            with files.own_directory(self._place.directory) as folder:
                found = os.stat(self._place.agent_lock.name, dir_fd=folder)
            return os.path.samestat(found, os.fstat(self._lock))
        except OSError:
            return False


# -- log, place and wake-ups


class _Printable(logging.Formatter):
    """Formats log lines without control characters, which texts from journals may contain."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = printable(record.message, most=len(record.message))
        return super().formatMessage(record)


def log_to_stderr() -> None:
    """Set up the agent's log."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Printable(f"%(asctime)s{LOG_FORM}%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def find_place(conf: settings.Settings, foreground: bool) -> Place:
    """The directory whose journals this agent reads."""
    if not foreground:
        # The training process that started this agent has created the directory.
        os.stat(conf.directory)
        return Place(Path(conf.directory))
    places, remark = find(conf.directory, offline=conf.offline)
    if not places:
        raise ConfigError(remark)
    if remark:
        log.warning("%s", remark)
    return places[0]


def lock_place(place: Place) -> int | None:
    """Lock the directory; returns the lock's descriptor, or None if another agent has the lock.

    The directory stays locked until the descriptor is closed.
    """
    fd = files.open_own(place.agent_lock, os.O_RDWR | os.O_CREAT)
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            files.lock(fd)
            return fd
        # Try again for a while: the agent that has the lock may be about to end.
        time.sleep(0.05)
    os.close(fd)
    return None


def leave_training_alone() -> None:
    """Undo the inherited CPU pinning, and lower the priority, to take no time from the training."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with contextlib.suppress(OSError):
        os.nice(5)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def collect_garbage_less_often() -> None:
    """Run the cyclic garbage collector less often.

    The agent creates and drops thousands of records, which contain no reference cycles. With
    Python's threshold of 700 objects, the collector took a quarter of the agent's time if ranks log
    many values.
    """
    gc.freeze()
    _, middle, old = gc.get_threshold()
    gc.set_threshold(_MORE_OBJECTS, middle, old)


def open_doorbell(path: Path) -> int:
    """Open the fifo that wakes the agent; -1 if that fails, so that only the clock wakes it."""
    try:
        if not path.is_fifo() or path.is_symlink():
            files.remove(path)
            files.make_fifo(path)
        # Open the fifo for writing too: once its last writer has closed it, a fifo is always
        # readable, so the agent would never sleep.
        return files.open_own(path, os.O_RDWR)
    except OSError as error:
        log.warning("no fifo to wake the agent (%s): it notices ends of processes later", error)
        return -1


def wait(doorbell: int, handles: list[int], tick_s: float = TICK_S) -> None:
    """Sleep for a tick, or until the doorbell or a handle is readable.

    *doorbell*: -1 if there is none. *handles*: pidfds, readable after the death of the process.
    """
    # Don't use select(): it accepts only descriptors below 1024, and the agent opens two for each
    # training process.
    poll = select.poll()
    for each in (doorbell, *handles) if doorbell >= 0 else handles:
        poll.register(each, select.POLLIN)
    if doorbell in dict(poll.poll(tick_s * 1000)):
        os.read(doorbell, 4096)


def main(directory: str = "", foreground: bool = False) -> int:
    """Run the agent of a journal directory; returns the exit status."""
    log_to_stderr()
    try:
        conf = settings.read(directory=directory or None)
        place = find_place(conf, foreground)
        lock = lock_place(place)
    except (ConfigError, OSError) as error:
        log.error("%s", error)
        return 2
    if lock is None:
        if foreground:
            log.error("an agent already runs for %s", place.directory)
        return 1
    for doubt in settings.doubts(exports=not conf.offline):
        log.warning("%s", doubt)
    # The default limit may be too low: the agent opens two descriptors for each training process.
    files.raise_file_limit()
    if not foreground:
        leave_training_alone()
    # Let no process start another agent for some seconds: if this one fails at its start, it must
    # not be restarted at once. The delay is cancelled once the agent works.
    place.delay_start(_BROKEN_HOLD_S)
    if foreground:
        log.info("watching %s", place.directory)
    # If a person has chosen the directory, keep the journals in it: they may be copies.
    keeps_found = foreground and bool(directory)
    agent = Agent(place, conf, lock, foreground, keeps_found=keeps_found)
    collect_garbage_less_often()
    # If the previous agent was killed, its file lists all its processes. Keep only those whose
    # journals still exist.
    leave(place, last_of_agent(place))
    agent.run()
    place.delay_start(0.0)
    return 0
