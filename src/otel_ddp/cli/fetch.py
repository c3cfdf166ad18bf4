"""Gets one answer of an agent on this node over HTTP."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import (
    HTTPRedirectHandler,
    ProxyHandler,
    Request,
    build_opener,
)

from otel_ddp.history.terminal import printable

_MOST_BYTES = 64 * 1024 * 1024


class NoAnswer(Exception):
    """Why there is no answer, without any credentials."""


class _NoRedirect(HTTPRedirectHandler):
    """A redirect is an answer: urllib would take the token to wherever it leads."""

    def redirect_request(self, *_: Any) -> None:
        return None


def get(
    url: str,
    headers: Mapping[str, str] | None = None,
    *,
    answer_s: float = 5.0,
    method: str = "GET",
) -> tuple[int, bytes]:
    """Status and body; raises NoAnswer."""
    # The proxy of a cluster has another loopback.
    opener = build_opener(_NoRedirect(), ProxyHandler({}))
    try:
        try:
            answer = opener.open(
                Request(url, headers=dict(headers or {}), method=method), timeout=answer_s
            )
        except HTTPError as refused:
            answer = refused
        with answer:
            return answer.code, answer.read(_MOST_BYTES)
    except (OSError, http.client.HTTPException) as error:
        why = error.reason if isinstance(error, URLError) else error
        late = isinstance(why, TimeoutError)
        raise NoAnswer("no answer in time" if late else printable(str(why))) from None
