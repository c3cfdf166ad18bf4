"""The node agent: its life from the lock to the last flush."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import select
import signal
import socket
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_ddp import __version__, catalog, settings
from otel_ddp.agent.export.exporter import Exporter
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.node.gpu.nvml.driver import Nvml
from otel_ddp.agent.node.sampling import Sampling
from otel_ddp.agent.reading.journals import Journals
from otel_ddp.agent.verdicts import postmortem
from otel_ddp.agent.verdicts.judge import Judge
from otel_ddp.errors import ConfigError
from otel_ddp.journal import agent_environment, locks
from otel_ddp.journal.place import Place, find, private_directory

if TYPE_CHECKING:
    from otel_ddp.agent.scrape.endpoint import Endpoint

log = logging.getLogger("otel_ddp.agent")

TICK_S = 0.25
_STAND_S = 1.0
_SAY_S = 5.0
_PROBE_S = 15.0
_LOCK_PATIENCE_S = 3.0
_BROKEN_HOLD_S = 10.0
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_LOG_BYTES = 256 * 1024


class Agent:
    """One a place. `run` is its whole life."""

    def __init__(
        self, place: Place, conf: settings.Settings, lock: int, foreground: bool = False
    ) -> None:
        self.place = place
        self.conf = conf
        self.foreground = foreground
        self.ledger = Ledger()
        host = socket.gethostname()
        self.node = conf.node or host
        self.sampling = Sampling(self.ledger, self.node, conf.sources, Nvml)
        judge = Judge(
            self.ledger,
            conf.stall_timeout_s,
            postmortem.directory(conf.postmortem_directory),
            gpus=self.sampling.gpus,
        )
        self.processes = Journals(place, self.ledger, conf.node, judge)
        self.exporter = Exporter(conf, place, self.ledger, self.processes, self.node, host)
        self.terms = agent_environment.terms(os.environ, offline=conf.offline)
        self._lock = lock
        self._leaving = ""
        self._doorbell = -1
        self._started_ns = time.time_ns()
        self._busy_at = self._moved_at = time.monotonic()
        self._said: tuple[float, bytes] = (0.0, b"")
        self._endpoint: Endpoint | None = None
        self._remark = ""

    # -- life

    def run(self) -> None:
        """Until told to stop, or until nothing is left to do."""
        self._doorbell = _open_doorbell(self.place.doorbell)
        self._listen_to_signals()
        self.processes.sweep()
        self.processes.look()
        self._serve()
        self.sampling.start()
        self.exporter.connect()
        self.place.hold_starts(0.0)
        self._say()
        log.info("serving %s; OTLP: %s", self._url() or "nothing", self.exporter.state())
        stand_at = export_at = 0.0
        probe_at = time.monotonic() + _PROBE_S
        try:
            while not self._leaving:
                self._moved_at = time.monotonic()
                self.processes.look()
                self.processes.take()
                if self.processes.somebody_waits():
                    self._stand()
                    self.exporter.hand_over()
                now = time.monotonic()
                if now >= stand_at:
                    stand_at = now + _STAND_S
                    self._stand()
                    self._look_at_ourselves()
                if now >= probe_at:
                    probe_at = now + _PROBE_S
                    self.exporter.connect()
                if now >= export_at:
                    export_at = now + self.conf.interval_s
                    self.exporter.export()
                if not self.exporter.open:
                    self.processes.commit(self.processes.marks())
                self.processes.release(self._say)
                self._sleep()
        finally:
            self._end()

    def _sleep(self) -> None:
        if not self._leaving:
            # A death wakes us as well: who was first is then known by the time.
            wait(self._doorbell, self.processes.judge.handles())

    def _listen_to_signals(self) -> None:
        def stop(number: int, frame: object) -> None:
            self._leaving = f"told to by {signal.Signals(number).name}"
            self.place.ring()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, stop)

    def _look_at_ourselves(self) -> None:
        """Whether there is a reason to leave; and say how we are."""
        self.processes.retire(self.conf.linger_s)
        now = time.monotonic()
        others = self.processes.terms() - {self.terms, ""}
        if self.processes.any_alive():
            self._busy_at = now
        if not self._owns_lock():
            self._leaving = "the place or its lock was removed"
        elif self.foreground:
            pass
        elif others and self.processes.terms() == others:
            # Its process starts another one, with the variables that it has itself.
            self._leaving = "the processes that run now were started with other OTEL_* variables"
        elif self.processes.empty() and now - self._busy_at >= self.conf.linger_s:
            self._leaving = f"no process has run for {self.conf.linger_s:g} s"
        # Whoever runs an agent in the foreground means its variables to be its own.
        if others and not self._leaving and not self.foreground:
            self._remark = (
                "a process was started with other OTEL_* variables than the agent, which keeps "
                "those of the first one until that has ended"
            )
        self._say()

    def _owns_lock(self) -> bool:
        # Somebody who deletes the lock file lets a second agent in: then the first one goes.
        try:
            return os.stat(self.place.agent_lock).st_ino == os.fstat(self._lock).st_ino
        except OSError:
            return False

    def _end(self) -> None:
        log.info("leaving: %s", self._leaving or "an error")
        self.processes.look()
        self.processes.take()
        self._stand()
        if self.exporter.open:
            self.exporter.export()
            self.exporter.close()
        else:
            self.processes.commit(self.processes.marks())
        self.processes.release(self._say)
        self.sampling.stop()
        if self._endpoint is not None:
            self._endpoint.stop()
        if self._owns_lock():
            for path in (self.place.agent_file, self.place.doorbell):
                with contextlib.suppress(OSError):
                    path.unlink()

    # -- standing

    def _stand(self) -> None:
        self.processes.stand()
        now_ns = time.time_ns()
        with self.ledger.lock:
            self.sampling.stand(self.processes.ranks(), self.processes.pids(), now_ns)
            self._stand_ourselves(now_ns)

    def _stand_ourselves(self, now_ns: int) -> None:
        labels = (("node", self.node),)

        def put(metric: catalog.Metric, value: float, *more: tuple[str, str]) -> None:
            self.ledger.put(metric, (*labels, *more), float(value), now_ns, self._started_ns)

        put(catalog.OTEL_DDP_AGENT_CPU_TIME, time.process_time())
        facts = self.exporter.facts()
        if facts is None:
            return
        put(catalog.OTEL_DDP_SPOOL_SIZE, facts.spool_bytes)
        for outcome in ("delivered", "failed", "refused"):
            put(catalog.OTEL_DDP_EXPORTS, getattr(facts, outcome), ("outcome", outcome))
        lost = {**facts.dropped_points, "rejected": facts.rejected_points}
        lost["history_full"] = self.ledger.points_dropped
        for why, count in lost.items():
            put(catalog.OTEL_DDP_POINTS_DROPPED, count, ("why", why))

    # -- the endpoint and the status

    def _serve(self) -> None:
        from otel_ddp.agent.scrape.endpoint import Endpoint

        host, port = self.conf.scrape_host, self.conf.scrape_port
        try:
            self._endpoint = Endpoint(
                *(self.ledger, host, port, self.status),
                still_s=lambda: time.monotonic() - self._moved_at,
            )
        except OSError as error:
            self._remark = (
                f"no scrape endpoint: {host} cannot be bound ({error.strerror}): set "
                "OTEL_EXPORTER_PROMETHEUS_HOST to an address of this machine, or to 0.0.0.0"
            )
            log.warning("%s", self._remark)
            return
        self._endpoint.start()
        if host not in _LOOPBACK:
            log.warning(
                "/metrics is served on %s, to everyone who reaches it: it has no password and no "
                "encryption. Keep it behind a network policy or a proxy that has.",
                host,
            )
        if port and self._endpoint.port != port:
            self._remark = f"port {port} is taken, so {self._endpoint.port} is used"

    def _url(self) -> str | None:
        return None if self._endpoint is None else self._endpoint.url

    def status(self) -> dict[str, Any]:
        """What the agent says on its page."""
        return {**self._about(), "processes": self.processes.described()}

    def _about(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "version": __version__,
            "node": self.node,
            "started_ns": self._started_ns,
            "scrape": self._url(),
            "export": self.exporter.state(),
            "remark": "; ".join(filter(None, (self._remark, self.processes.remark()))),
            "unreadable": self.processes.unreadable(),
            "nodes": self.processes.nodes(),
            "ended": self.processes.ended(),
            "verdicts": self.processes.judge.verdicts(),
            "told": self.processes.judge.findings(),
            "insufficient": self.processes.judge.insufficient(),
            "notes": self.processes.silent.notes(),
            **self.sampling.describe(),
        }

    def _say(self) -> None:
        """Write the agent's file: when there is news, and now and then to show that we move."""
        content = json.dumps(self._about()).encode()
        said_at, said = self._said
        now = time.monotonic()
        if content == said and now - said_at < _SAY_S and self.place.agent_file.exists():
            return
        temporary = self.place.agent_file.with_suffix(".new")
        try:
            temporary.write_bytes(content)
            temporary.replace(self.place.agent_file)
        except OSError:
            return  # a full tmpfs: the status shows less, nothing else
        self._said = now, content


def _open_doorbell(path: Path) -> int:
    """The fifo that wakes us; -1 where it cannot be had, and we look by the clock alone."""
    try:
        try:
            if not stat.S_ISFIFO(os.lstat(path).st_mode):
                path.unlink()
                os.mkfifo(path, 0o600)
        except FileNotFoundError:
            os.mkfifo(path, 0o600)
        # Read and write: a fifo whose last writer has gone would be readable for ever.
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        log.warning("no doorbell (%s): ends of processes are seen a moment later", error)
        return -1


def wait(doorbell: int, handles: list[int], tick_s: float = TICK_S) -> None:
    """For a tick, or until the doorbell (-1 where there is none) or one of the handles wakes us."""
    # Not select(), which takes no number above 1023: each process costs two.
    watched = select.poll()
    try:
        for each in (doorbell, *handles) if doorbell >= 0 else handles:
            watched.register(each, select.POLLIN)
        woken = dict(watched.poll(tick_s * 1000))
        waited = not any(events & select.POLLNVAL for events in woken.values())
    except (OSError, ValueError):
        woken, waited = {}, False
    if not waited:
        # One that cannot be waited for would never let us sleep: we go by the clock.
        time.sleep(tick_s)
    if doorbell in woken:
        with contextlib.suppress(OSError):
            os.read(doorbell, 4096)


def _step_aside() -> None:
    """Started by a training process: give up what we inherited of its privileges and pins."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    with contextlib.suppress(OSError):
        os.nice(5)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")


def take_the_lock(place: Place) -> int | None:
    """Become the agent of this place; None if there is one. Closing what comes back ends it."""
    fd = os.open(place.agent_lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + _LOCK_PATIENCE_S
    while not _locked(fd):
        if time.monotonic() > deadline:
            os.close(fd)
            return None
        # The one before us may be on its way out.
        time.sleep(0.05)
    return fd


def _locked(fd: int) -> bool:
    try:
        locks.take(fd)
    except OSError:
        return False
    return True


def main(directory: str = "", foreground: bool = False) -> int:
    """Run the agent of a place until it is over; the exit status."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s otel-ddp agent: %(message)s", stream=sys.stderr
    )
    try:
        conf = settings.read(directory=directory or None)
        place = _place(conf, foreground)
        lock = take_the_lock(place)
    except (ConfigError, OSError) as error:
        log.error("%s", error)
        return 2
    if lock is None:
        if foreground:
            log.error("an agent already runs for %s", place.directory)
        return 1
    with contextlib.suppress(OSError, ValueError):
        # Two descriptors a living process: a node may have many.
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if not foreground:
        _step_aside()
        with contextlib.suppress(OSError):
            if place.agent_log.stat().st_size > _LOG_BYTES:
                os.truncate(place.agent_log, 0)
    # What an agent that was killed said of itself is not true of us.
    with contextlib.suppress(OSError):
        place.agent_file.unlink()
    # Whoever finds no agent from here on may start one at once; but one that breaks at its start
    # is not started again every few seconds.
    place.hold_starts(_BROKEN_HOLD_S)
    if foreground:
        log.info("watching %s", place.directory)
    Agent(place, conf, lock, foreground).run()
    place.hold_starts(0.0)
    return 0


def _place(conf: settings.Settings, foreground: bool) -> Place:
    if not foreground:
        # Whoever started us made it; if it is gone by now, so is our work.
        os.stat(conf.directory)
        return Place(private_directory(Path(conf.directory)))
    places, remark = find(conf.directory, offline=conf.offline)
    if not places:
        raise ConfigError(remark)
    if remark:
        log.warning("%s", remark)
    return places[0]
