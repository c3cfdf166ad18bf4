"""The way out by OTLP: found or configured, then fed from the ledger."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from hashlib import blake2s
from pathlib import Path
from typing import TYPE_CHECKING

from otel_ddp import containment
from otel_ddp.agent.ledger import Ledger
from otel_ddp.agent.processes import Processes
from otel_ddp.journal.place import Place
from otel_ddp.settings import Settings

if TYPE_CHECKING:
    from otel_ddp.agent.delivery import Delivery, Facts
    from otel_ddp.agent.export import Renderer

log = logging.getLogger("otel_ddp.agent")

_SETTLE_S = 0.12
_SIGNALS = ("metrics", "traces", "logs")
_ENDPOINTS = tuple(
    f"OTEL_EXPORTER_OTLP_{part}ENDPOINT" for part in ("", "METRICS_", "TRACES_", "LOGS_")
)


class Outlet:
    """Closed until `connect` finds somewhere to send to."""

    def __init__(
        self,
        conf: Settings,
        place: Place,
        ledger: Ledger,
        processes: Processes,
        node: str,
        host: str,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        self._conf = conf
        self._place = place
        self._ledger = ledger
        self._processes = processes
        self._node, self._host = node, host
        self._env = env
        # Standard variables: each signal can be switched off by itself.
        self._signals = {
            each
            for each in _SIGNALS
            if env.get(f"OTEL_{each.upper()}_EXPORTER", "").strip().lower() != "none"
        }
        self._delivery: Delivery | None = None
        self._renderer: Renderer | None = None

    @property
    def open(self) -> bool:
        return self._delivery is not None

    @containment.contained()
    def connect(self) -> None:
        """Begin to export, if a collector was named or one answers on loopback."""
        if self.open or not self._signals:
            return
        # These packages take a fifth of a second to import: only who needs them pays.
        from otel_ddp.agent.otlp import transport

        conf = self._conf
        if not any(self._env.get(name) for name in _ENDPOINTS):
            found = transport.probe()
            if found is None:
                return
            conf = conf._replace(endpoint=found, protocol="http/protobuf")
        from otel_ddp.agent.delivery import Delivery
        from otel_ddp.agent.export import Renderer
        from otel_ddp.agent.otlp import resource
        from otel_ddp.agent.spool import Spool

        self._renderer = Renderer(resource.describe(self._node, self._host))
        directory = spool_directory(conf.spool_directory, self._place, self._node)
        spool = Spool(directory, conf.spool_bytes)
        self._delivery = Delivery(transport.Transport(conf), spool)
        self._delivery.start()
        self._ledger.keep_history = True

    @containment.contained()
    def export(self, settled: Callable[[], None] | None = None) -> None:
        """Hand everything new to the delivery; the journals' marks follow when it is settled."""
        if self._delivery is None or self._renderer is None:
            return
        marks = self._processes.marks()

        def in_safe_hands() -> None:
            self._processes.commit(marks)
            if settled is not None:
                settled()

        requests = self._renderer.metrics(self._ledger, time.time_ns())
        requests += self._renderer.documents(self._processes.documents())
        wanted = [request for request in requests if request.signal in self._signals]
        self._delivery.submit(wanted, in_safe_hands)

    def hand_over(self) -> None:
        """A process has ended and may be waiting: see its last values into safe hands now."""
        if self._delivery is None:
            self._processes.commit(self._processes.marks())
            return
        settled: list[bool] = []
        self._processes.handed(self._processes.marks())
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

    def facts(self) -> Facts | None:
        """What became of what was sent."""
        return None if self._delivery is None else self._delivery.snapshot()

    def state(self) -> str:
        """The same in a sentence."""
        if (facts := self.facts()) is not None:
            return facts.state
        if not self._signals:
            return "switched off by OTEL_*_EXPORTER=none: scrape only"
        return "no collector is configured and none answers on loopback: scrape only"


def spool_directory(named: str, place: Place, node: str = "") -> Path:
    """Where this agent's spool lies: agents of different nodes or places never share one.

    Found again by the next agent, after a reboot too: so by what the node is called, and by
    nothing that is new with each start. Who is called alike is told apart by the spool's lock.
    """
    base = Path(named) if named else Path("/var/tmp") / f"otel_ddp-{os.geteuid()}"
    who = f"{node or socket.gethostname()}\0{place.directory}"
    digest = blake2s(os.fsencode(who), digest_size=4).hexdigest()
    return base / f"spool-{digest}"
