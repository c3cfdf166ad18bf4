"""Sends messages to one address: a webhook by itself, any other by the library apprise.

An address may be a secret as a whole. So it is never logged, and no error's own text is shown.
"""

from __future__ import annotations

import base64
import http.client
import importlib.util
import json
import logging
import re
import ssl
import threading
import urllib.error
import urllib.request
from hashlib import blake2s
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from otel_ddp import __version__, errors
from otel_ddp.agent.notify.message import Message
from otel_ddp.agent.queue import Outcome
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

    @property
    def problem(self) -> str:
        """What keeps each message from it, as far as that is known without a try."""
        known = self._scheme in _WEBHOOK or importlib.util.find_spec("apprise")
        return "" if known else _NEEDS_APPRISE

    def send(self, message: Message) -> Outcome:
        """Try it once, for some seconds at most."""
        if self._scheme in _WEBHOOK:
            return self._post(message)
        failed = Outcome("retry", "the library apprise failed")
        with _APPRISE:
            return errors.attempt(lambda: self._by_apprise(message), failed)

    def _post(self, message: Message) -> Outcome:
        try:
            with _opener().open(self._request(message), timeout=_ANSWER_S):
                return Outcome("delivered")
        except urllib.error.HTTPError as error:
            error.close()
            return _answered(error.code)
        except (OSError, ValueError, http.client.HTTPException) as error:
            return Outcome("retry", _reason(error))

    def _request(self, message: Message) -> urllib.request.Request:
        parts = urlsplit(self._url)
        user, _, host = parts.netloc.rpartition("@")
        headers = {"Content-Type": "application/json", "User-Agent": f"otel_ddp/{__version__}"}
        if user:
            word = base64.b64encode(unquote(user).encode()).decode()
            headers["Authorization"] = f"Basic {word}"
        address = urlunsplit((parts.scheme, host, parts.path, parts.query, ""))
        body = json.dumps(message.to_json()).encode()
        return urllib.request.Request(address, body, headers, method="POST")

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
    return Outcome("refused" if code in _REFUSALS else "retry", f"it answered {code}")


def _reason(error: BaseException) -> str:
    """Why, without the address, which the text of an error may hold."""
    inner = getattr(error, "reason", error)
    if isinstance(inner, ssl.SSLError):
        return f"TLS: {getattr(inner, 'verify_message', '') or inner.reason or 'failed'}"
    if isinstance(inner, TimeoutError):
        return f"no answer within {_ANSWER_S:g} s"
    said = inner.strerror if isinstance(inner, OSError) else None
    return said or type(inner).__name__


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A message would arrive there as a GET, without its content."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirects)


class _Codes(logging.Handler):
    """Of what apprise logs, the number of the last answer: the lines may hold addresses."""

    code = 0

    def emit(self, record: logging.LogRecord) -> None:
        if found := re.search(r"error=(\d{3})", record.getMessage()):
            self.code = int(found[1])
