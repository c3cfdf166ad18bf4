"""One message, and one address that it goes to: a webhook, or any other by the library apprise.

An address may be a secret as a whole. So it is never logged, and no error's own text is shown.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
from collections.abc import Mapping
from hashlib import blake2s
from typing import Any, NamedTuple

from otel_ddp import __version__, errors
from otel_ddp.agent.export.otlp.variables import take_user
from otel_ddp.agent.queue.delivery import Outcome
from otel_ddp.history.terminal import without_mentions

_ANSWER_S = 10.0
# Where the part behind `://` is a host. Elsewhere it may be a token, as for Slack or Telegram.
_WITH_HOST = ("http", "https", "json", "jsons", "xml", "xmls", "form", "forms", "mailto", "mailtos")
_WEBHOOK = ("http", "https")
# After any other answer a later try may succeed.
_REFUSALS = (400, 401, 403, 405, 410, 413, 415, 422)
_LEVELS = {"info": "info", "warn": "warning", "error": "failure"}
# One at a time: it tells of an answer in its log alone.
_APPRISE = threading.Lock()
_NEEDS_APPRISE = "it needs the library apprise: pip install 'otel-ddp[notify]'"


# A receiver may rely on the names of this version: docs/notifications.md lists them.
SCHEMA = 1


class Message(NamedTuple):
    """One notification; what it is not about is empty."""

    id: str
    """The same each time it is sent."""
    kind: str
    """A kind of verdict, or `ended`, `alert`, `test`."""
    level: str
    """`info`, `warn` or `error`."""
    title: str
    text: str
    time: str
    """When it was made, in UTC, as RFC 3339 writes it."""
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
        """Raises KeyError where it is none."""
        return cls(*(str(content[name]) for name in cls._fields))


class Address:
    """One of OTEL_DDP_NOTIFY."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.key = blake2s(url.encode("utf-8", "replace"), digest_size=8).hexdigest()
        """Stands for it on disk."""
        scheme, _, rest = url.partition("://")
        self._scheme = scheme.lower()
        first = re.split("[/?#]", rest, maxsplit=1)[0]
        # A password with a `/` in it would look like a host.
        is_host = self._scheme in _WITH_HOST and ("@" in first or "@" not in rest)
        self.shown = f"{self._scheme}://{first.rpartition('@')[2] if is_host else '...'}"
        """Without anything that may be a secret."""

    def send(self, message: Message) -> Outcome:
        """Try it once, for some seconds at most."""
        if self._scheme in _WEBHOOK:
            return self._post(message)
        failed = Outcome("retry", "the library apprise failed")
        with _APPRISE:
            return errors.attempt(lambda: self._by_apprise(message), failed)

    def _post(self, message: Message) -> Outcome:
        # Imported here: it takes long, and few agents notify.
        from otel_ddp.agent.export.otlp.over_http import UNANSWERED, Route, explain

        url, authorization = take_user(self._url)
        headers = {"Content-Type": "application/json", "User-Agent": f"otel_ddp/{__version__}"}
        if authorization:
            headers["Authorization"] = authorization
        body = json.dumps(message.to_json()).encode()
        try:
            # A redirect is not followed: it would make a GET of it, without its content.
            with contextlib.closing(Route(url, _ANSWER_S)) as route:
                return _answered(route.post(body, headers).status)
        except UNANSWERED as error:
            return Outcome("retry", explain(error, "the receiver", _ANSWER_S))

    def _by_apprise(self, message: Message) -> Outcome:
        try:
            # Imported here: it takes long, and few addresses need it.
            import apprise
        except ImportError:
            return Outcome("retry", _NEEDS_APPRISE)
        said = _Codes()
        log = logging.getLogger("apprise")
        log.propagate, log.handlers = False, [said]
        # No limit of its own: for that it needs threads, which an agent that ends would wait for.
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
    """Of what apprise logs, the number of the last answer: the lines may hold addresses."""

    code = 0

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.search(r"error=(\d{3})", record.getMessage()):
            self.code = int(found[1])
