"""Exports the ledger by OTLP to the configured collector, or to disk."""

from __future__ import annotations

import logging
import os
import shlex
import socket
import time
from collections.abc import Callable, Mapping
from hashlib import blake2s
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from otel_ddp import errors
from otel_ddp.agent.export.otlp import (
    NO_COLLECTOR,
    SIGNALS,
    exported_signals,
    signals_with_endpoint,
)
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.agent.queue import Request
from otel_ddp.journal.place import Place
from otel_ddp.settings import Settings

if TYPE_CHECKING:
    from otel_ddp.agent.export.report import DeliveryReport, DeliveryStatus
    from otel_ddp.agent.queue.delivery import Delivery
    from otel_ddp.agent.queue.folder import Queue
    from otel_ddp.journal.parser import Document

log = logging.getLogger("otel_ddp.agent")

# How the names of offline agents' folders begin; a digest follows.
OFFLINE_PREFIX = "offline-"
# How long the agent waits for the collector when a process has ended, before it uses the disk.
_SETTLE_S = 0.12


Marks = dict[Path, tuple[int, int, int]]


class Source(Protocol):
    """What the exporter needs of the journals: they keep everything that is not committed."""

    def marks(self) -> Marks:
        """How far each journal is read."""

    def commit(self, marks: Marks) -> None:
        """What was read up to here is delivered or on disk."""


class _Way(NamedTuple):
    """What the requests go through."""

    queue: Queue
    delivery: Delivery
    report: DeliveryReport


class Exporter:
    """Sends nothing before `connect`."""

    def __init__(
        self,
        conf: Settings,
        place: Place,
        ledger: Ledger,
        source: Source,
        documents: Callable[[], list[tuple[Labels, str, list[Document]]]],
        node: str,
        host: str,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        """*documents*: the spans and events that are new since the last call."""
        self._conf = conf
        self._place = place
        self._ledger = ledger
        self._source = source
        self._documents = documents
        self._node, self._host = node, host
        self._env = env
        self._signals = exported_signals(env) if conf.offline else signals_with_endpoint(conf, env)
        self._way: _Way | None = None
        self._why_none = NO_COLLECTOR
        self.failed_to_start = False
        """There is a collector to export to, and an error kept us from it; it is tried again."""
        self._render: Callable[[], list[Request]] = list
        # How far the journals were read when they were exported last.
        self._marks: Marks = {}

    @property
    def connected(self) -> bool:
        return self._way is not None

    def connect(self) -> None:
        """Begin to export if a collector is named, or to keep all on disk if it is offline."""
        if not self.connected and self._signals:
            self.failed_to_start = not self._connect()
            if self.failed_to_start:
                self._why_none = "exporting could not start: the agent's log says why"
                # Until the next try, what is logged waits in the ledger.
                self._ledger.keep_history = True

    @errors.contained(default=False)
    def _connect(self) -> bool:
        # These packages take a fifth of a second to import: only an agent that exports pays.
        from otel_ddp.agent.export.otlp import resource
        from otel_ddp.agent.export.otlp.documents import Documents
        from otel_ddp.agent.export.otlp.transport import Transport
        from otel_ddp.agent.export.render import Renderer
        from otel_ddp.agent.export.report import DeliveryReport
        from otel_ddp.agent.queue.delivery import Delivery
        from otel_ddp.agent.queue.folder import Queue

        attributes = resource.describe(self._node, self._host)
        renderer, documents = Renderer(attributes), Documents(attributes)
        self._render = lambda: [
            *renderer.metrics(self._ledger, time.time_ns()),
            *documents.render(self._documents()),
        ]
        transport, offline = Transport(self._conf, self._env), self._conf.offline
        prefix = OFFLINE_PREFIX if offline else "spool-"
        folder = folder_of(prefix, self._conf, self._place, self._node)
        queue = Queue(SIGNALS, folder, self._conf.spool_bytes)
        report = DeliveryReport("" if offline else transport.destination, queue, time.monotonic)
        self._way = _Way(queue, Delivery(queue, transport.send, report), report)
        for thread in self.threads():
            thread.keep_running()
        self._ledger.keep_history = True
        return True

    @errors.contained()
    def export(self) -> None:
        """Hand over everything new; where nothing leaves, what is read is done with."""
        if self._way is None:
            if not self.failed_to_start:
                self._marks = self._source.marks()
            return
        # Whoever took that long for the last ones may take long for all.
        self._way.delivery.secure(0.0)
        self.commit()
        marks = self._source.marks()
        self._way.delivery.put([each for each in self._render() if each.lane in self._signals])
        self._marks = marks

    def export_at_once(self) -> None:
        """A process has ended and may wait: deliver its last values now, or put them on disk."""
        self.export()
        if self._way is not None:
            self._way.delivery.secure(_SETTLE_S)
            self._source.commit(self._marks)

    def commit(self) -> None:
        """Commit to the journals what was exported, or never will be."""
        if self._way is None or not self._way.delivery.is_under_way():
            self._source.commit(self._marks)

    def busy(self) -> bool:
        """Whether memory alone has something: the agent should stay until it is taken."""
        return self._way is not None and self._way.queue.memory_bytes > 0

    def threads(self) -> list[KeptThread]:
        """The delivery threads; none offline."""
        return [] if self._way is None or self._conf.offline else self._way.delivery.threads()

    def stop(self) -> None:
        """Deliver for a second at most; the rest goes to disk."""
        if self._way is not None:
            self._way.delivery.stop(1.0, 1.0)
            self.commit()

    def status(self) -> DeliveryStatus | None:
        """How the delivery goes; None where nothing is exported."""
        if self._way is None:
            return None
        with self._way.delivery.lock:
            return self._way.report.status()

    def describe(self) -> str:
        """How the export goes, in a sentence."""
        if self._way is not None and (status := self.status()) is not None:
            if not self._conf.offline:
                return status.state
            folder = self._way.queue.folder
            sentence = f"{status.state}; `otel-ddp replay {shlex.quote(str(folder))}` sends them"
            if lost := status.dropped_points.get("spool_full"):
                sentence += f"; {lost} points had to make room (OTEL_DDP_SPOOL_BYTES)"
            return sentence
        if not exported_signals(self._env):
            return "switched off by OTEL_*_EXPORTER=none: scrape only"
        return f"{self._why_none}: scrape only"


def folder_of(prefix: str, conf: Settings, place: Place, node: str = "") -> Path:
    """The folder of what waits in this agent; agents of different nodes or places never share one.

    The next agent finds it again, also after a reboot. So its name depends on the node's name and
    on the place, and on nothing that is new with each start. Agents with the same name for both
    are kept apart by the queue's lock. Offline requests are in folders of their own, where no
    agent that sends looks for them.
    """
    name = f"{node or socket.gethostname()}\0{place.directory}"
    digest = blake2s(os.fsencode(name), digest_size=4).hexdigest()
    return Path(conf.spools) / f"{prefix}{digest}"
