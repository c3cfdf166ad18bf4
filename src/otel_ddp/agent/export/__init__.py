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
from typing import TYPE_CHECKING, Protocol

from otel_ddp import errors
from otel_ddp.agent.export.otlp import (
    NO_COLLECTOR,
    Request,
    exported_signals,
    signals_with_endpoint,
)
from otel_ddp.agent.export.report import DeliveryStatus
from otel_ddp.agent.export.spool import OFFLINE_PREFIX
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.journal.place import Place
from otel_ddp.settings import Settings

if TYPE_CHECKING:
    from otel_ddp.agent.export.delivery import Delivery, Sender
    from otel_ddp.agent.export.spool import Spool
    from otel_ddp.journal.parser import Document

log = logging.getLogger("otel_ddp.agent")

# How long the agent waits for the collector when a process has ended, before it uses the disk.
_SETTLE_S = 0.12


Marks = dict[Path, tuple[int, int, int]]


class Source(Protocol):
    """What the exporter needs of the journals: they keep everything that is not committed."""

    def marks(self) -> Marks:
        """How far each journal is read."""

    def commit(self, marks: Marks) -> None:
        """What was read up to here is delivered or on disk."""

    def submitted(self, marks: Marks) -> None:
        """What was read up to here was handed to the delivery."""


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
        self._spool: Spool | None = None
        self._delivery: Delivery | None = None
        self._why_none = NO_COLLECTOR
        self.failed_to_start = False
        """There is a collector to export to, and an error kept us from it; it is tried again."""
        self._render: Callable[[], list[Request]] = list

    @property
    def connected(self) -> bool:
        return self._delivery is not None

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
        from otel_ddp.agent.export.otlp.transport import Transport

        self._start(None if self._conf.offline else Transport(self._conf, self._env))
        return True

    def _start(self, sender: Sender | None) -> None:
        from otel_ddp.agent.export.delivery import Delivery
        from otel_ddp.agent.export.otlp import resource
        from otel_ddp.agent.export.otlp.documents import Documents
        from otel_ddp.agent.export.render import Renderer
        from otel_ddp.agent.export.spool import Spool

        attributes = resource.describe(self._node, self._host)
        renderer = Renderer(attributes)
        documents = Documents(attributes)
        directory = spool_directory(self._conf, self._place, self._node)
        spool = Spool(directory, self._conf.spool_bytes)
        ledger = self._ledger
        delivery = Delivery(sender, spool)
        self._render = lambda: [
            *renderer.metrics(ledger, time.time_ns()),
            *documents.render(self._documents()),
        ]
        self._spool, self._delivery = spool, delivery
        delivery.start()
        self._ledger.keep_history = True

    @errors.contained()
    def export(self, on_settled: Callable[[], None] | None = None) -> None:
        """Submit everything new; the journals' marks are committed once that is settled."""
        if self._delivery is None:
            return
        marks = self._source.marks()

        def commit() -> None:
            self._source.commit(marks)
            if on_settled is not None:
                on_settled()

        requests = [each for each in self._render() if each.signal in self._signals]
        self._delivery.submit(requests, commit)

    def export_at_once(self) -> None:
        """A process has ended and may wait: deliver its last values now, or put them on disk."""
        if self._delivery is None:
            if not self.failed_to_start:
                self._source.commit(self._source.marks())
            return
        settled: list[bool] = []
        self._source.submitted(self._source.marks())
        self.export(lambda: settled.append(True))
        deadline = time.monotonic() + _SETTLE_S
        while not settled and time.monotonic() < deadline:
            time.sleep(0.002)
        if not settled:
            self._delivery.move_to_disk()

    def threads(self) -> list[KeptThread]:
        """The threads that deliver."""
        return [] if self._delivery is None else self._delivery.threads()

    def stop(self) -> None:
        """Deliver for a second at most; the rest goes to disk."""
        if self._delivery is not None:
            self._delivery.flush(1.0)
            self._delivery.stop(1.0)

    def status(self) -> DeliveryStatus | None:
        """How the delivery goes; None where nothing is exported."""
        return None if self._delivery is None else self._delivery.status()

    def describe(self) -> str:
        """How the export goes, in a sentence."""
        if (status := self.status()) is not None and self._spool is not None:
            if not self._conf.offline:
                return status.state
            directory = shlex.quote(str(self._spool.directory))
            sentence = f"{status.state}; `otel-ddp replay {directory}` sends them"
            if lost := status.dropped_points.get("spool_full"):
                sentence += f"; {lost} points had to make room (OTEL_DDP_SPOOL_BYTES)"
            return sentence
        if not exported_signals(self._env):
            return "switched off by OTEL_*_EXPORTER=none: scrape only"
        return f"{self._why_none}: scrape only"


def spool_directory(conf: Settings, place: Place, node: str = "") -> Path:
    """The directory of this agent's spool; agents of different nodes or places never share one.

    The next agent finds it again, also after a reboot. So its name depends on the node's name and
    on the place, and on nothing that is new with each start. Agents with the same name for both
    are kept apart by the spool's lock. Offline spools are in directories of their own, where no
    agent that sends looks for requests.
    """
    name = f"{node or socket.gethostname()}\0{place.directory}"
    digest = blake2s(os.fsencode(name), digest_size=4).hexdigest()
    return Path(conf.spools) / f"{OFFLINE_PREFIX if conf.offline else 'spool-'}{digest}"
