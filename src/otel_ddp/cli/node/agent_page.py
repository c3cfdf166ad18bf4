"""Asks the agent of this node for stacks of other nodes, as its page does."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from otel_ddp import files
from otel_ddp.agent.scrape import access
from otel_ddp.history.page.guard import ASKED
from otel_ddp.history.terminal import printable
from otel_ddp.identity import addresses
from otel_ddp.journal.place import Place

_MOST_BYTES = 64 * 1024 * 1024


def credentials(named: str) -> Mapping[str, str]:
    """The headers that show the token of OTEL_DDP_SCRAPE_TOKEN_FILE."""
    try:
        token = access.find_token(named, "127.0.0.1").decode()
    except (access.Refused, ValueError):
        token = ""  # the agent says what is wrong with it
    return {"Authorization": f"Bearer {token}"} if token else {}


def ask_stacks(
    place: Place, allowed: Mapping[str, str], answer_s: float, query: Mapping[str, str]
) -> Mapping[str, Any] | str:
    """The answer of the agent of a place, or a sentence on why there is none."""
    if not place.agent_is_alive():
        return "no agent runs here"
    if not (base := addresses.page(place)):
        return "the agent has no endpoint: `otel-ddp doctor` says why"
    try:
        url = f"{base}/api/stacks?{urlencode(query)}"
        headers = {**allowed, ASKED: "page"}
        status, body = _post(url, headers, answer_s)
        found = files.parse_json(body) if status == http.client.OK else None
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "reason", error)
        return f"the agent at {base} does not answer ({printable(str(why))})"
    if status == http.client.UNAUTHORIZED:
        return f"{base} wants a token: set OTEL_DDP_SCRAPE_TOKEN_FILE as its agent has it"
    if not isinstance(found, dict):
        return f"the agent at {base} answers {status}: is it of another version?"
    return found


class _NoRedirect(HTTPRedirectHandler):
    """A redirect is an answer: urllib would take the token to wherever it leads."""

    def redirect_request(self, *_: Any) -> None:
        return None


def _post(url: str, headers: Mapping[str, str], answer_s: float) -> tuple[int, bytes]:
    """Status and body of the answer."""
    # The proxy of a cluster has another loopback.
    opener = build_opener(_NoRedirect(), ProxyHandler({}))
    try:
        answer = opener.open(Request(url, headers=dict(headers), method="POST"), timeout=answer_s)
    except HTTPError as refused:
        answer = refused
    with answer:
        return answer.code, answer.read(_MOST_BYTES)
