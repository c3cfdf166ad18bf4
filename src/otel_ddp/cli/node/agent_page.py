"""Asks an agent of this node what its page asks it, as its user."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from otel_ddp import files
from otel_ddp.agent.scrape import web_config
from otel_ddp.cli import fetch
from otel_ddp.history.page.guard import ASKED
from otel_ddp.identity import addresses
from otel_ddp.journal.place import Place


class Credentials(NamedTuple):
    """The token of a web configuration, and how its agent's certificate is checked."""

    headers: Mapping[str, str] = {}
    tls: ssl.SSLContext | None = None
    """None: it is not."""


def credentials(named: str) -> Credentials:
    """Those of OTEL_DDP_WEB_CONFIG."""
    if named in ("", web_config.INSECURE):
        return Credentials()
    try:
        rules = web_config.read(Path(named))
        token = rules.token.decode()
    except (web_config.Refused, ValueError):
        token = ""  # the agent says what is wrong with it
    if not token:
        return Credentials()
    # A token goes to the server of the agent's own certificate alone: after the agent's end its
    # port may be another's.
    tls = ssl.create_default_context(cafile=rules.certificate or None)
    tls.check_hostname = False
    tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return Credentials({"Authorization": f"Bearer {token}"}, tls)


def ask(
    place: Place,
    allowed: Credentials,
    path: str,
    *,
    post: bool = False,
    answer_s: float = 5.0,
    **query: str,
) -> Mapping[str, Any] | str:
    """The answer of the agent of a place, or a sentence on why there is none."""
    if not place.agent_is_alive():
        return "no agent runs: `otel-ddp status` reads the journals without one"
    if not (base := addresses.page(place)):
        return "the agent has no endpoint: `otel-ddp doctor` says why"
    headers = {**allowed.headers, ASKED: "page"} if post else allowed.headers
    tls = allowed.tls or fetch.unverified()
    try:
        url = f"{base}/api/{path}?{urlencode(query)}"
        status, body = fetch.get(
            url, headers, answer_s=answer_s, tls=tls, method="POST" if post else "GET"
        )
        found = files.parse_json(body) if status == http.client.OK else None
    except (fetch.NoAnswer, ValueError) as why:
        return f"the agent at {base} does not answer ({why})"
    if status == http.client.UNAUTHORIZED:
        return f"{base} wants a token: set OTEL_DDP_WEB_CONFIG as its agent has it"
    if not isinstance(found, dict):
        return f"the agent at {base} answers {status}: is it of another version?"
    return found
