"""Tells people what happens to runs: once each, and not too many, until an address has taken it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from otel_ddp import errors, files
from otel_ddp.agent.kept_thread import KeptThread
from otel_ddp.agent.notify.addresses import Address, Message
from otel_ddp.agent.notify.occasions import Occasions
from otel_ddp.agent.queue.delivery import Delivery, Outcome
from otel_ddp.agent.queue.folder import BLOCK_BYTES, Queue, Request
from otel_ddp.agent.reading.process import Process
from otel_ddp.agent.verdicts.run_case import RunCase
from otel_ddp.diagnosis.verdict import Labels
from otel_ddp.settings import Settings

# Of one kind, run and hour: a script's alerts must not leave out the run's death.
MOST_OF_A_KIND, _HOUR_S = 20, 3600.0
# For each address.
_MOST_WAITING = 100
_DAY_S = 86400.0
# An agent whose training has ended stays so long for a message that an address has not taken.
_STAY_S = 3600.0
_PAUSES_S = (5.0, 300.0)
_LAST = (
    f"This is message {MOST_OF_A_KIND} of this kind and run within an hour: further ones are left "
    "out. `otel-ddp status` shows them."
)


class Outbox:
    """The agent's loop puts messages in; a thread of each address sends them."""

    def __init__(
        self,
        folder: Path,
        addresses: Sequence[Address],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._addresses = {each.key: each for each in addresses}
        self._clock = clock
        most_bytes = _MOST_WAITING * len(addresses) * BLOCK_BYTES
        self._queue = Queue(self._addresses, folder, most_bytes, most_bytes)
        names = {each.key: f"notification to {each.shown}" for each in addresses}
        self.delivery = Delivery(self._queue, self._send, names, clock, backoff_s=_PAUSES_S)
        # By message id: its kind, group and run, and when it was queued.
        self._told: dict[str, tuple[str, float]] = {}
        self._left_out = 0

    def put(self, message: Message) -> None:
        """Send it from now on, unless it was told before or there are too many of its kind."""
        now = self._clock()
        self._told = {key: each for key, each in self._told.items() if now - each[1] < _DAY_S}
        if message.id in self._told:
            return
        kind = f"{message.kind}/{message.group}/{message.run}"
        of_kind = sum(each == kind and now - at < _HOUR_S for each, at in self._told.values())
        if of_kind >= MOST_OF_A_KIND:
            self._left_out += 1
            return
        if of_kind == MOST_OF_A_KIND - 1:
            message = message._replace(text=f"{message.text}\n\n{_LAST}".strip())
        self._told[message.id] = kind, now
        body = json.dumps(message.to_json()).encode()
        is_alert = message.kind == "alert"
        self.delivery.put(Request(key, body, 1, not is_alert, int(now)) for key in self._addresses)

    def give_up_old(self) -> None:
        """What has waited for a day is no news any more."""
        with self.delivery.lock:
            for request in self._waiting():
                if self._waited_s(request) > _DAY_S:
                    self._queue.remove(request, "age")

    def _send(self, key: str, body: bytes) -> Outcome:
        try:
            message = Message.from_json(files.parse_json(body))
        except (KeyError, TypeError, ValueError):
            return Outcome("refused", "what waited is no message of this version")
        return self._addresses[key].send(message)

    def _waited_s(self, request: Request) -> float:
        return self._clock() - request.oldest_s

    def is_awaited(self) -> bool:
        """Whether the agent should stay for what waits."""
        with self.delivery.lock:
            return any(self._waited_s(each) < _STAY_S for each in self._waiting())

    def _waiting(self) -> list[Request]:
        return [each for lane in self._queue.lanes.values() for each in lane]

    def describe(self) -> str:
        """How it goes, in a sentence."""
        addresses, taken = self._addresses.values(), self.delivery.attempts["delivered"]
        shown = ", ".join(each.shown for each in addresses)
        to = f"to {len(addresses)} address{'es' * (len(addresses) > 1)} ({shown})"
        with self.delivery.lock:
            waiting, given_up = len(self._waiting()), self._queue.dropped.total()
            troubles = self.delivery.troubles().items()
        counts = {
            "wait": waiting,
            f"left out beyond {MOST_OF_A_KIND} a kind, run and hour": self._left_out,
            "given up": given_up,
        }
        parts = [f"{to}: {taken} taken", *(f"{n} {word}" for word, n in counts.items() if n)]
        problem = [f"the disk does not take them ({why})"] if (why := self._queue.problem) else []
        failing = [f"{self._addresses[key].shown}: {why}" for key, why in troubles]
        return "; ".join([", ".join(parts), *problem, *failing])


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
        self._occasions = Occasions()

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
