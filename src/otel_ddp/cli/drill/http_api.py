"""Asks an HTTP API for JSON, with a token or a user, and never takes those elsewhere."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import (
    BaseHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
    build_opener,
)

from otel_ddp.agent.export.otlp.addresses import is_loopback, take_user, without_credentials
from otel_ddp.agent.export.otlp.outcome import one_line
from otel_ddp.errors import foreign_json

_TIMEOUT_S = 30.0
# A board or the list of all rules is below a megabyte.
_MOST_BYTES = 64 << 20


class NoAnswer(Exception):
    """Why there is no answer, without any credentials; the status, if there was one."""

    def __init__(self, why: str, status: int = 0) -> None:
        super().__init__(why)
        self.status = status


class HttpApi:
    """One server. The user in its address and the token are sent to it alone."""

    def __init__(self, url: str, token: str = "") -> None:
        self.name = without_credentials(url, with_path=True).rstrip("/")
        address, basic = take_user(url)
        self._address = address.rstrip("/")
        self._authorization = f"Bearer {token}" if token else basic
        self._opener = _opener(url)

    @property
    def tells_secrets(self) -> bool:
        """Whether a token or password goes unencrypted to another machine."""
        plain = self._address.lower().startswith("http://")
        return bool(self._authorization) and plain and not is_loopback(self._address)

    def below(self, path: str) -> HttpApi:
        """The same server, from this path on."""
        found = HttpApi(f"{self._address}{path}")
        found._authorization = self._authorization
        return found

    def get(self, path: str, asked: Mapping[str, str] | None = None) -> Any:
        """What is answered to this question."""
        query = f"?{urlencode(asked)}" if asked else ""
        return self._answer(Request(f"{self._address}{path}{query}"))

    def post(self, path: str, asked: Mapping[str, str]) -> Any:
        """The same for questions that are too long for an address."""
        return self._answer(Request(f"{self._address}{path}", data=urlencode(asked).encode()))

    def _answer(self, request: Request) -> Any:
        request.add_header("Accept", "application/json")
        if self._authorization:
            request.add_header("Authorization", self._authorization)
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                return foreign_json.parse(answer.read(_MOST_BYTES))
        except HTTPError as error:
            with error:
                raise NoAnswer(_refusal(error), error.code) from None
        except URLError as error:
            raise NoAnswer(f"no answer ({one_line(str(error.reason))})") from None
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"no answer ({one_line(str(error)) or type(error).__name__})") from None
        except ValueError:
            raise NoAnswer("the answer is no JSON: is another server there?") from None


class _NoRedirect(HTTPRedirectHandler):
    """A redirect is an error: urllib would take the token to wherever it leads."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _opener(url: str) -> OpenerDirector:
    # The variables SSL_CERT_FILE and SSL_CERT_DIR name other authorities.
    handlers: list[BaseHandler] = [
        _NoRedirect(),
        HTTPSHandler(context=ssl.create_default_context()),
    ]
    if is_loopback(url):
        # The proxy of a cluster has another loopback.
        handlers.append(ProxyHandler({}))
    return build_opener(*handlers)


def _refusal(error: HTTPError) -> str:
    """The status of an answer, with the reason that Prometheus or Grafana gives."""
    if 300 <= error.code < 400:
        return f"{error.code}, a redirect: name the address that it leads to"
    try:
        told = foreign_json.parse(error.read(_MOST_BYTES))
        why = told.get("error") or told.get("message") or ""
    except (OSError, ValueError, AttributeError, http.client.HTTPException):
        why = ""
    return f"{error.code} {one_line(str(why) or str(error.reason))}".strip()
