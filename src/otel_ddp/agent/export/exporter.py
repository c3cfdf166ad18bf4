"""The way out by OTLP: found, configured, or the disk for later; then fed from the ledger."""

from __future__ import annotations

import os
import shlex
import socket
import time
from collections.abc import Callable, Mapping
from hashlib import blake2s
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from otel_ddp import containment
from otel_ddp.agent.export.otlp.outcome import wanted
from otel_ddp.agent.export.spool import OFFLINE
from otel_ddp.agent.ledger import Labels, Ledger
from otel_ddp.journal.place import Place
from otel_ddp.journal.reader import Document
from otel_ddp.settings import Settings

if TYPE_CHECKING:
    from otel_ddp.agent.export.delivery import Delivery, Facts, Sender
    from otel_ddp.agent.export.render import Renderer
    from otel_ddp.agent.export.spool import Spool

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
    """Closed until `connect` finds somewhere to send to."""

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
        self._signals = wanted(env)
        self._spool: Spool | None = None
        self._delivery: Delivery | None = None
        self._renderer: Renderer | None = None

    @property
    def open(self) -> bool:
        return self._delivery is not None

    @containment.contained()
    def connect(self) -> None:
        """Begin to export, if a collector was named or one answers on loopback; or offline."""
        if self.open or not self._signals:
            return
        if self._conf.offline:
            self._begin(None)
            return
        # These packages take a fifth of a second to import: only who needs them pays.
        from otel_ddp.agent.export.otlp import transport

        if conf := transport.addressed(self._conf, self._env):
            self._begin(transport.Transport(conf))

    def _begin(self, sender: Sender | None) -> None:
        from otel_ddp.agent.export.delivery import Delivery
        from otel_ddp.agent.export.otlp import resource
        from otel_ddp.agent.export.render import Renderer
        from otel_ddp.agent.export.spool import Spool

        self._renderer = Renderer(resource.describe(self._node, self._host))
        directory = spool_directory(self._conf, self._place, self._node)
        self._spool = Spool(directory, self._conf.spool_bytes)
        self._delivery = Delivery(sender, self._spool)
        self._delivery.start()
        self._ledger.keep_history = True

    @containment.contained()
    def export(self, settled: Callable[[], None] | None = None) -> None:
        """Hand everything new to the delivery; the journals' marks follow when it is settled."""
        if self._delivery is None or self._renderer is None:
            return
        marks = self._source.marks()

        def in_safe_hands() -> None:
            self._source.commit(marks)
            if settled is not None:
                settled()

        requests = self._renderer.metrics(self._ledger, time.time_ns())
        requests += self._renderer.documents(self._documents())
        to_export = [request for request in requests if request.signal in self._signals]
        self._delivery.submit(to_export, in_safe_hands)
        if self._conf.offline:
            self._say_full()

    def hand_over(self) -> None:
        """A process has ended and may be waiting: see its last values into safe hands now."""
        if self._delivery is None:
            self._source.commit(self._source.marks())
            return
        settled: list[bool] = []
        self._source.submitted(self._source.marks())
        self.export(lambda: settled.append(True))
        deadline = time.monotonic() + _SETTLE_S
        while not settled and time.monotonic() < deadline:
            time.sleep(0.002)
        if not settled:
            self._delivery.take_over()

    def close(self) -> None:
        """Deliver what can be delivered in a second; the rest goes to disk."""
        if self._delivery is not None:
            self._delivery.flush(1.0)
            self._delivery.stop(1.0)

    def _say_full(self) -> None:
        facts = self.facts()
        if facts is not None and facts.dropped_points.get("spool_full"):
            containment.warn_once(
                "offline spool",
                "what is kept for later fills OTEL_DDP_SPOOL_BYTES (%d bytes): from now on the "
                "oldest makes room for the newest, first of all how series stood, then what was "
                "logged.",
                self._conf.spool_bytes,
            )

    def facts(self) -> Facts | None:
        """What became of what was sent."""
        return None if self._delivery is None else self._delivery.snapshot()

    def state(self) -> str:
        """The same in a sentence."""
        if (facts := self.facts()) is not None and self._spool is not None:
            return _kept(facts, self._spool) if self._conf.offline else facts.state
        if not self._signals:
            return "switched off by OTEL_*_EXPORTER=none: scrape only"
        return "no collector is configured and none answers on loopback: scrape only"


def _kept(facts: Facts, spool: Spool) -> str:
    """What an offline agent has to say of its spool."""
    from otel_ddp.agent.export.delivery import size

    if spool.problem:
        waiting = f"{size(facts.memory_bytes)} wait in memory"
        return f"offline: the disk does not take it ({spool.problem}), {waiting}"
    where = shlex.quote(str(spool.directory))
    told = f"offline: {size(facts.spool_bytes)} wait in {where}"
    if lost := facts.dropped_points.get("spool_full"):
        told += f", {lost} points had to make room (OTEL_DDP_SPOOL_BYTES)"
    return f"{told}; `otel-ddp replay {where}` sends them"


def spool_directory(conf: Settings, place: Place, node: str = "") -> Path:
    """Where this agent's spool lies: agents of different nodes or places never share one.

    Found again by the next agent, after a reboot too: so by what the node is called, and by
    nothing that is new with each start. Who is called alike is told apart by the spool's lock.
    What offline runs leave lies apart, where no agent that sends looks for it.
    """
    who = f"{node or socket.gethostname()}\0{place.directory}"
    digest = blake2s(os.fsencode(who), digest_size=4).hexdigest()
    return Path(conf.spools) / f"{OFFLINE if conf.offline else 'spool-'}{digest}"
