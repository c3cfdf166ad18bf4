"""Tells people what happens to runs: the loop says what there is, a thread sends it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from otel_ddp import errors
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.notify.addresses import Address
from otel_ddp.agent.notify.message import Message
from otel_ddp.agent.notify.occasions import Occasions
from otel_ddp.agent.notify.outbox import Outbox
from otel_ddp.agent.reading.process import Process
from otel_ddp.agent.verdicts.run_case import RunCase
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.settings import Settings

_LOOK_EVERY_S = 1.0
_STOP_S = 3.0


class Notifier:
    """One an agent. Where no address is named, it does nothing."""

    def __init__(self, conf: Settings, folder: Path) -> None:
        """*folder*: where messages wait."""
        self._addresses: Sequence[Address] = []
        self._why_none = "off: OTEL_DDP_NOTIFY names no address"
        if conf.notify and conf.offline:
            self._why_none = "off: OTEL_DDP_AGENT=offline sends nothing"
        elif conf.notify:
            self._addresses = [*map(Address, dict.fromkeys(conf.notify))]
            self._why_none = "starting"
        self._occasions = Occasions(conf.grafana_url)
        self._folder = folder
        # The thread makes it: its disk may hang.
        self._outbox: Outbox | None = None
        # What the thread has not taken yet.
        self._new: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._stopping = False
        self.thread = KeptThread("notify", self._work)

    # -- called by the agent's loop

    @errors.contained()
    def poll(
        self,
        cases: Collection[RunCase],
        feeds: Collection[Process],
        page: str,
        *,
        leaving: bool = False,
    ) -> None:
        """After each judging. *page*: the address of the agent's page; *leaving*: it ends."""
        if not self._addresses:
            return
        now = time.monotonic()
        for message in self._occasions.poll(cases, feeds, page, now, leaving=leaving):
            self._new.put(message)
            self._wake.set()

    @property
    def ending(self) -> Collection[Labels]:
        """The runs that the judge keeps until the message on their end is queued."""
        return self._occasions.ending

    def threads(self) -> Iterator[KeptThread]:
        """The thread that sends, if there is an address."""
        if self._addresses:
            yield self.thread

    def busy(self) -> bool:
        """Whether the agent should stay for what waits."""
        waits = self._outbox is not None and self._outbox.is_awaited()
        return bool(self.ending) or not self._new.empty() or waits

    def describe(self) -> str:
        """How it goes, in a sentence without secrets."""
        return self._outbox.describe() if self._outbox else self._why_none

    def stop(self) -> None:
        """Send for a moment more; the rest waits on disk for the next agent."""
        self._stopping = True
        self._wake.set()
        self.thread.join(_STOP_S)

    # -- the thread

    def _work(self) -> None:
        # An error may have ended the thread, and then it is started again.
        outbox = self._outbox = self._outbox or Outbox(self._folder, self._addresses)
        while True:
            self._wake.wait(_LOOK_EVERY_S)
            self._wake.clear()
            stopping = self._stopping
            while not self._new.empty():
                outbox.put(self._new.get())
            outbox.deliver()
            if stopping:
                return
