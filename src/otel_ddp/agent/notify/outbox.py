"""Queues messages until each address has accepted them.

Messages to webhooks are posted directly, messages to other addresses by the library apprise. An
address may contain a secret anywhere, so whole addresses and texts of errors are never logged.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2s
from pathlib import Path
from typing import Any, NamedTuple

from otel_ddp import __version__, errors, files
from otel_ddp.agent.export.delivery import Delivery, Outcome
from otel_ddp.agent.export.folder import BLOCK_BYTES, Queue, Request
from otel_ddp.agent.export.post import UNANSWERED, Route, explain, take_user
from otel_ddp.history.terminal import without_mentions

_ANSWER_S = 10.0
# Schemes whose addresses begin with a host, which may be shown. Addresses of other schemes, e.g. of
# Slack and Telegram, may begin with a token.
_WITH_HOST = ("http", "https", "json", "jsons", "xml", "xmls", "form", "forms", "mailto", "mailtos")
_WEBHOOK = ("http", "https")
# HTTP status codes after which a message is not sent again, since it would be refused again.
_REFUSALS = (400, 401, 403, 405, 410, 413, 415, 422)
_LEVELS = {"info": "info", "warn": "warning", "error": "failure"}
# Held while apprise sends a message. Only apprise's log has the status code, so only one message is
# sent at a time: otherwise the code could belong to another one.
_APPRISE = threading.Lock()
_NEEDS_APPRISE = "it needs the library apprise: pip install 'otel-ddp[notify]'"


# The version of the JSON format of messages. docs/notifications.md lists the keys of this version.
SCHEMA = 1


class Message(NamedTuple):
    """One notification. A label is empty if it does not apply, e.g. the rank of a whole run."""

    id: str
    """Stays the same when the message is sent again, so that receivers can drop duplicates."""
    kind: str
    """`ended`, `alert`, `test`, or the kind of the verdict that the message is about."""
    level: str
    """`info`, `warn` or `error`."""
    title: str
    text: str
    time: str
    """Creation time, UTC, RFC 3339."""
    group: str = ""
    run: str = ""
    node: str = ""
    rank: str = ""
    url: str = ""
    """The page of the run."""

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **self._asdict()}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Message:
        """The inverse of `to_json`. Raises KeyError if a key is missing."""
        return cls(*(str(content[name]) for name in cls._fields))


class Address:
    """One address of OTEL_DDP_NOTIFY."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.key = blake2s(url.encode("utf-8", "replace"), digest_size=8).hexdigest()
        """Stands for this address in the names of the files with its queued messages."""
        scheme, _, rest = url.partition("://")
        self._scheme = scheme.lower()
        first = re.split("[/?#]", rest, maxsplit=1)[0]
        # If an `@` follows only after the first slash, the part before the slash is not shown: it
        # may be the start of a password that contains a slash.
        is_host = self._scheme in _WITH_HOST and ("@" in first or "@" not in rest)
        self.shown = f"{self._scheme}://{first.rpartition('@')[2] if is_host else '...'}"
        """The address without parts that may be secret."""

    def send(self, message: Message) -> Outcome:
        """Try to send once, for a few seconds at most."""
        if self._scheme in _WEBHOOK:
            return self._post(message)
        failed = Outcome("retry", "the library apprise failed")
        with _APPRISE:
            return errors.attempt(lambda: self._by_apprise(message), failed)

    def _post(self, message: Message) -> Outcome:
        url, authorization = take_user(self._url)
        headers = {"Content-Type": "application/json", "User-Agent": f"otel_ddp/{__version__}"}
        if authorization:
            headers["Authorization"] = authorization
        body = json.dumps(message.to_json()).encode()
        try:
            # Don't follow redirects: they would turn the POST into a GET without the message.
            with contextlib.closing(Route(url, _ANSWER_S)) as route:
                return _answered(route.post(body, headers).status)
        except UNANSWERED as error:
            return Outcome("retry", explain(error, "the receiver", _ANSWER_S))

    def _by_apprise(self, message: Message) -> Outcome:
        try:
            # Import apprise only here: this takes long, and few addresses need it.
            import apprise
        except ImportError:
            return Outcome("retry", _NEEDS_APPRISE)
        said = _Codes()
        log = logging.getLogger("apprise")
        log.propagate, log.handlers = False, [said]
        # Switch apprise's own timeout off: it uses threads, which would delay the agent's end.
        service = apprise.Apprise(asset=apprise.AppriseAsset(service_timeout=0))
        if not service.add(self._url):
            return Outcome("refused", "apprise does not know this form of address")
        title = without_mentions(message.title)
        text = without_mentions(message.text)
        text = "\n\n".join(filter(None, (text, message.url))) or title
        how = {"notify_type": _LEVELS[message.level], "body_format": "text"}
        if service.notify(text, title=title, **how):
            return Outcome("delivered")
        return _answered(said.code) if said.code else Outcome("retry", "apprise could not send it")


def _answered(code: int) -> Outcome:
    if 200 <= code < 300:
        return Outcome("delivered")
    return Outcome("refused" if code in _REFUSALS else "retry", f"it answered {code}")


class _Codes(logging.Handler):
    """Extracts the last status code from apprise's log. The log itself is dropped, since its lines
    may contain secret addresses."""

    code = 0

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.search(r"error=(\d{3})", record.getMessage()):
            self.code = int(found[1])


# The most messages of one kind on one run in an hour. Each kind has its own limit, so that many
# alerts of a script do not suppress the message that the run has died.
MOST_OF_A_KIND, _HOUR_S = 20, 3600.0
# How many messages may wait for each address.
_MOST_WAITING = 100
_DAY_S = 86400.0
# How long the agent keeps running after the end of the training to deliver messages.
_STAY_S = 3600.0
_PAUSES_S = (5.0, 300.0)


class Outbox:
    """The agent's loop queues messages; one thread per address sends them."""

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
        # The messages that were queued in the last day. The key is the message's id; the value is
        # its kind, group and run as one text, and the time at which it was queued.
        self._queued: dict[str, tuple[str, float]] = {}
        self._left_out = 0

    def put(self, message: Message) -> None:
        """Queue a message, unless it is a duplicate or exceeds the rate limit."""
        now = self._clock()
        self._queued = {key: each for key, each in self._queued.items() if now - each[1] < _DAY_S}
        if message.id in self._queued:
            return
        kind = f"{message.kind}/{message.group}/{message.run}"
        of_kind = sum(each == kind and now - at < _HOUR_S for each, at in self._queued.values())
        if of_kind >= MOST_OF_A_KIND:
            self._left_out += 1
            return
        self._queued[message.id] = kind, now
        body = json.dumps(message.to_json()).encode()
        is_alert = message.kind == "alert"
        self.delivery.put(Request(key, body, 1, not is_alert, int(now)) for key in self._addresses)

    def give_up_old(self) -> None:
        """Drop queued messages that were not delivered within a day."""
        with self.delivery.lock:
            for request in self._waiting():
                if self._waited_s(request) > _DAY_S:
                    self._queue.remove(request, "age")

    def _send(self, key: str, body: bytes) -> Outcome:
        try:
            message = Message.from_json(files.parse_json(body))
        except (KeyError, TypeError, ValueError):
            return Outcome("refused", "the queued message is of another version")
        return self._addresses[key].send(message)

    def _waited_s(self, request: Request) -> float:
        return self._clock() - request.oldest_s

    def is_awaited(self) -> bool:
        """Whether a message waits that is less than an hour old. The agent then keeps running."""
        with self.delivery.lock:
            return any(self._waited_s(each) < _STAY_S for each in self._waiting())

    def _waiting(self) -> list[Request]:
        return [each for lane in self._queue.lanes.values() for each in lane]

    def describe(self) -> str:
        """The line of `otel-ddp status` on notifications: addresses, counts, and failures."""
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
