"""Asks the agents of this node what their pages ask."""

from __future__ import annotations

import contextlib
import http.client
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from otel_ddp import files
from otel_ddp.agent.scrape import web_config
from otel_ddp.identity import addresses
from otel_ddp.journal.place import Place

_LONGEST_ANSWER = 64 * 1024 * 1024


class Agents:
    """Those of some places, as the user of the agents asks them."""

    def __init__(self, web_configuration: str, answer_s: float = 5.0) -> None:
        """*web_configuration*: OTEL_DDP_WEB_CONFIG, whose token an agent may ask for."""
        self._answer_s = answer_s
        self._headers: dict[str, str] = {}
        self._certificate = ""
        if web_configuration and web_configuration != web_config.INSECURE:
            try:
                rules = web_config.read(Path(web_configuration))
                self._certificate, token = rules.certificate, rules.token.decode()
            except (web_config.Refused, ValueError):
                token = ""  # the agent says what is wrong with it
            if token:
                self._headers["Authorization"] = f"Bearer {token}"

    def ask(self, place: Place, path: str, **query: str) -> Mapping[str, Any] | str:
        """The answer of the agent of a place, or a sentence on why there is none."""
        if not place.agent_is_alive():
            return "no agent runs: `otel-ddp status` reads the journals without one"
        base = addresses.page(place)
        if not base:
            return "the agent has no endpoint: `otel-ddp doctor` says why"
        try:
            with contextlib.closing(self._connection(base)) as connection:
                connection.request("GET", f"/api/{path}?{urlencode(query)}", headers=self._headers)
                response = connection.getresponse()
                body = response.read(_LONGEST_ANSWER)
            if response.status == http.client.UNAUTHORIZED:
                return f"{base} wants a token: set OTEL_DDP_WEB_CONFIG as its agent has it"
            found = files.parse_json(body)
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else error
            return f"the agent at {base} does not answer ({why})"
        if response.status != http.client.OK or not isinstance(found, dict):
            return f"the agent at {base} answers {response.status}: is it of another version?"
        return found

    def _connection(self, base: str) -> http.client.HTTPConnection:
        """Without a proxy: it is on this node."""
        where = urlsplit(base)
        at, patience_s = (where.hostname or "", where.port), self._answer_s
        if where.scheme == "http":
            return http.client.HTTPConnection(*at, timeout=patience_s)
        # A token goes to the server of the agent's own certificate alone: after the agent's end
        # its port may be another's.
        context = ssl.create_default_context(cafile=self._certificate or None)
        context.check_hostname = False
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if not self._headers:
            context.verify_mode = ssl.CERT_NONE
        return http.client.HTTPSConnection(*at, timeout=patience_s, context=context)
