"""Tells people what happens to runs: which messages there are, and how they go."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from otel_ddp import errors
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.notify.addresses import Address
from otel_ddp.agent.notify.occasions import Occasions
from otel_ddp.agent.notify.outbox import Outbox
from otel_ddp.agent.reading.process import Process
from otel_ddp.agent.verdicts.run_case import RunCase
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.settings import Settings


class Notifier:
    """One an agent, called by its loop. Where no address is named, it does nothing."""

    def __init__(self, conf: Settings, folder: Path) -> None:
        """*folder*: where messages wait."""
        self._outbox: Outbox | None = None
        self._why_none = "off: OTEL_DDP_NOTIFY names no address"
        if conf.notify and conf.offline:
            self._why_none = "off: OTEL_DDP_AGENT=offline sends nothing"
        elif conf.notify:
            self._outbox = Outbox(folder, [*map(Address, dict.fromkeys(conf.notify))])
        self._occasions = Occasions(conf.grafana_url)

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
        if self._outbox is not None:
            now = time.monotonic()
            for message in self._occasions.poll(cases, feeds, page, now, leaving=leaving):
                self._outbox.put(message)
            self._outbox.give_up_old()

    @property
    def ending(self) -> Collection[Labels]:
        """The runs that the judge keeps until the message on their end is queued."""
        return self._occasions.ending

    def threads(self) -> list[KeptThread]:
        """One for each address."""
        return [] if self._outbox is None else self._outbox.delivery.threads()

    def busy(self) -> bool:
        """Whether the agent should stay for what waits."""
        return bool(self.ending) or (self._outbox is not None and self._outbox.is_awaited())

    def describe(self) -> str:
        """How it goes, in a sentence without secrets."""
        return self._why_none if self._outbox is None else self._outbox.describe()

    def stop(self) -> None:
        """Send for a moment more; the rest waits on disk for the next agent."""
        if self._outbox is not None:
            self._outbox.delivery.stop(1.5, 1.5)
