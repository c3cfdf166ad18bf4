"""Exports the ledger, spans and log records over OTLP, or to disk if the agent is offline."""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2s
from pathlib import Path
from typing import TYPE_CHECKING

from otel_ddp import errors
from otel_ddp.agent.export.folder import Request
from otel_ddp.agent.export.otlp.variables import (
    LANES,
    NO_COLLECTOR,
    SIGNALS,
    exported_signals,
    signals_with_endpoint,
)
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.journal.place import Place
from otel_ddp.settings import Settings
from otel_ddp.vocabulary import catalog

if TYPE_CHECKING:
    from otel_ddp.agent.export.delivery import Delivery
    from otel_ddp.agent.export.folder import Queue
    from otel_ddp.journal.parser import Document

# An offline agent's folder has this prefix and a digest as its name.
OFFLINE_PREFIX = "offline-"
# After a process has ended, its data is written to disk if it is not delivered in this time.
_SETTLE_S = 0.12


Marks = dict[Path, tuple[int, int, int]]


class Exporter:
    """Exports all data of an agent. Does nothing until `connect`."""

    def __init__(
        self,
        conf: Settings,
        place: Place,
        ledger: Ledger,
        marks: Callable[[], Marks],
        commit: Callable[[Marks], None],
        documents: Callable[[], list[tuple[Labels, str, list[Document]]]],
        node: str,
        host: str,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        """*marks*: returns the read offset of each journal. *commit*: stores the offsets up to
        which records are delivered or on disk, so that the next agent continues there. *documents*:
        returns the spans and events since its last call."""
        self._conf = conf
        self._place = place
        self._ledger = ledger
        self._read_marks, self._commit_marks = marks, commit
        self._documents = documents
        self._node, self._host = node, host
        self._env = env
        self._signals = exported_signals(env) if conf.offline else signals_with_endpoint(conf, env)
        self._queue: Queue | None = None
        self._delivery: Delivery | None = None
        self._destination = ""
        self._render: Callable[[], Iterable[Request]] = list
        self._close_transport: Callable[[], object] = list
        # The read offset of each journal at the last export.
        self._marks: Marks = {}

    @property
    def connected(self) -> bool:
        return self._delivery is not None

    def connect(self) -> None:
        """Start exporting if a collector is set, or writing to disk if the agent is offline.

        The loop calls this repeatedly. Until it succeeds, logged values wait in the ledger.
        """
        if self._signals and not self.connected:
            self._ledger.keep_history = True
            self._connect()

    @errors.contained()
    def _connect(self) -> None:
        # Imported here: these packages take 0.2 s to import.
        from otel_ddp.agent.export.delivery import Delivery
        from otel_ddp.agent.export.folder import Queue
        from otel_ddp.agent.export.otlp.render import Renderer, resource_of
        from otel_ddp.agent.export.otlp.transport import Transport

        renderer = Renderer(resource_of(self._node, self._host))

        def render() -> Iterator[Request]:
            yield from renderer.metrics(self._ledger, time.time_ns())
            yield from renderer.documents(self._documents())

        self._render = render
        transport = Transport(self._conf, self._env)
        self._close_transport = transport.close
        prefix = OFFLINE_PREFIX if self._conf.offline else "spool-"
        folder = folder_of(prefix, self._conf, self._place, self._node)
        if not self._conf.offline:
            self._destination = transport.destination
        self._queue = Queue(SIGNALS, folder, self._conf.spool_bytes)
        self._delivery = Delivery(self._queue, transport.send, LANES)
        for thread in self.threads():
            thread.keep_running()

    @errors.contained()
    def export(self) -> None:
        """Queue all new data. Without a collector nothing is queued, and all that was read can be
        committed."""
        if self._delivery is None:
            if not self._signals:
                self._marks = self._read_marks()
            return
        # If the receiver has not yet accepted the requests of the last export, it seems to be slow:
        # write them to disk.
        self._delivery.secure(0.0)
        self.commit()
        marks = self._read_marks()
        self._delivery.put(each for each in self._render() if each.lane in self._signals)
        self._marks = marks

    def export_at_once(self) -> None:
        """Export now, since an ended process waits for it. Spool to disk all data that the
        collector does not accept soon."""
        self.export()
        if self._delivery is not None:
            self._delivery.secure(_SETTLE_S)
            self._commit_marks(self._marks)

    def commit(self) -> None:
        """Commit the offsets of the last export once its records are delivered, on disk or
        dropped."""
        if self._delivery is None or not self._delivery.is_under_way():
            self._commit_marks(self._marks)

    def busy(self) -> bool:
        """Whether some data is only in memory, so that the agent must not exit yet."""
        return self._delivery is not None and self._delivery.queue.memory_bytes > 0

    def threads(self) -> list[KeptThread]:
        """The delivery threads; none if the agent is offline."""
        return [] if self._delivery is None or self._conf.offline else self._delivery.threads()

    def stop(self) -> None:
        """Deliver for another second at most; the rest goes to disk."""
        if self._delivery is not None:
            self._delivery.stop(1.0, 1.0)
            self._close_transport()
            self.commit()

    def counts(self) -> list[tuple[catalog.Metric, int, Labels]]:
        """The values of the metrics about the export itself; an empty list without an export."""
        if self._delivery is None:
            return []
        with self._delivery.lock:
            size_bytes = self._delivery.queue.size_bytes
            attempts = dict(self._delivery.attempts)
            dropped = dict(self._delivery.queue.dropped)
        lost = {"rejected": 0, "history_full": self._ledger.points_dropped, **dropped}
        return [
            (catalog.OTEL_DDP_SPOOL_SIZE, size_bytes, ()),
            *((catalog.OTEL_DDP_EXPORTS, n, (("outcome", how),)) for how, n in attempts.items()),
            *((catalog.OTEL_DDP_POINTS_DROPPED, n, (("why", why),)) for why, n in lost.items()),
        ]

    def describe(self) -> str:
        """The state of the export, as a sentence that `status` shows."""
        queue = self._queue
        if self._delivery is None or queue is None:
            return f"{self._why_none()}: scrape only"
        with self._delivery.lock:
            waits, troubles = queue.describe(), self._delivery.troubles()
            lost = queue.dropped["spool_full"]
        if self._conf.offline:
            sentence = (
                f"offline: {waits}; `otel-ddp replay {shlex.quote(str(queue.folder))}` sends them"
            )
            if lost:
                sentence += f"; {lost} points had to make room (OTEL_DDP_SPOOL_BYTES)"
            return sentence
        if troubles:
            return f"{', '.join(troubles)}: {next(iter(troubles.values()))}, {waits}"
        done = "delivering" if self._delivery.attempts["delivered"] else "nothing sent yet"
        return f"{done} to {self._destination}"

    def _why_none(self) -> str:
        if self._signals:
            return "exporting has not started, an error would be in the agent's log"
        off = not exported_signals(self._env)
        return "switched off by OTEL_*_EXPORTER=none" if off else NO_COLLECTOR


def folder_of(prefix: str, conf: Settings, place: Place, node: str = "") -> Path:
    """The queue folder of this agent.

    The next agent has to find the folder again, even after a reboot, so the name depends only on
    the node's name and the journal directory. If two agents share both, the queue's lock makes one
    of them use another folder. Offline requests have their own folders, which no sending agent
    reads.
    """
    name = f"{node or socket.gethostname()}\0{place.directory}"
    digest = blake2s(os.fsencode(name), digest_size=4).hexdigest()
    return Path(conf.spools) / f"{prefix}{digest}"
