"""Asks a Prometheus: whether alerts fire, and what it has recorded of weeks."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from otel_ddp import files
from otel_ddp.agent.export.otlp import is_loopback, take_user, without_credentials
from otel_ddp.cli import fetch
from otel_ddp.cli.text import cell, mapping, mappings

_ANSWER_S = 30.0


class Prometheus:
    """One server, or what speaks its API; user and token are sent to it alone."""

    def __init__(self, url: str, token: str) -> None:
        self.name = without_credentials(url, with_path=True).rstrip("/")
        address, basic = take_user(url)
        self._address, self._is_here = address.rstrip("/"), is_loopback(url)
        authorization = f"Bearer {token}" if token else basic
        self._headers = {"Authorization": authorization} if authorization else {}

    @classmethod
    def at(cls, url: str, option: str) -> Prometheus:
        """That of an option; raises ValueError."""
        if not url.lower().startswith(("http://", "https://")):
            raise ValueError(
                f"{option} needs an address that begins with http:// or https://: {url!r}"
            )
        return cls(url, os.environ.get("PROMETHEUS_TOKEN", "").strip())

    def series(self, name: str, **labels: str) -> list[Mapping[str, Any]]:
        """Those of this name that have these labels; raises fetch.NoAnswer, as all questions do."""
        chosen = ",".join(f"{label}={json.dumps(text)}" for label, text in labels.items())
        return self.query(f"{name}{{{chosen}}}")

    def query(self, expr: str) -> list[Mapping[str, Any]]:
        """What it says to this expression now: of each series `metric` and `value`."""
        url = f"{self._address}/api/v1/query?{urlencode({'query': expr})}"
        try:
            # The proxy of a cluster has another loopback.
            answer = fetch.get(url, self._headers, answer_s=_ANSWER_S, by_proxy=not self._is_here)
        except fetch.NoAnswer as why:
            raise fetch.NoAnswer(f"{self.name}: {why}") from None
        status, body = answer
        told: Mapping[str, Any] = {}
        with contextlib.suppress(ValueError):
            told = mapping(files.parse_json(body))
        if status != HTTPStatus.OK:
            reason = cell(told.get("error"))
            raise fetch.NoAnswer(f"{self.name} answers {status}{reason and f': {reason}'}")
        data = told.get("data")
        if not isinstance(data, dict):
            raise fetch.NoAnswer(f"{self.name} is no Prometheus: is another server there?")
        return mappings(data.get("result"))
