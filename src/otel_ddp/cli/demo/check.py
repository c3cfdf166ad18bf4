"""Asks a Prometheus whether the alert of a trouble fires, and if it does not, why."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import HTTPRedirectHandler, ProxyHandler, Request, build_opener

from otel_ddp import files
from otel_ddp.agent.export.otlp import is_loopback, one_line, take_user, without_credentials
from otel_ddp.cli.demo.injection import PHASES
from otel_ddp.cli.text import mappings
from otel_ddp.vocabulary import catalog

# A trouble, and the alert that it must raise.
ALERTS = {
    **{phase: "TrainingStraggler" for phase in PHASES if phase != "checkpoint"},
    "hang": "TrainingStalled",
    "kill": "TrainingRunKilled",
    "nan": "TrainingLossNotFinite",
    "imbalance": "TrainingImbalance",
}
# What is played where no trouble is named: one of each kind.
PLAYED = ("backward:1:30ms", "hang:1", "kill:1")
_TIMEOUT_S = 30.0
_MOST_BYTES = 16 << 20


class NoAnswer(Exception):
    """Why there is no answer, without any credentials."""


class _NoRedirect(HTTPRedirectHandler):
    """A redirect is an error: urllib would take the token to wherever it leads."""

    def redirect_request(self, *_: Any) -> None:
        return None


class Prometheus:
    """One server, or what speaks its API; user and token are sent to it alone."""

    def __init__(self, url: str, token: str) -> None:
        self.name = without_credentials(url, with_path=True).rstrip("/")
        address, basic = take_user(url)
        self._address = address.rstrip("/")
        self._authorization = f"Bearer {token}" if token else basic
        # The proxy of a cluster has another loopback.
        direct = [ProxyHandler({})] if is_loopback(url) else []
        self._opener = build_opener(_NoRedirect(), *direct)

    def fires(self, alert: str, run: str) -> bool:
        """Whether the alert fires for this run."""
        return bool(self._series("ALERTS", alertname=alert, alertstate="firing", run=run))

    def why_not(self, alert: str, run: str) -> str:
        """What is missing on the way to the alert, and where to look."""
        if not self._series(catalog.TRAINING_STATE.prometheus, run=run):
            return (
                f"{self.name} has no series of {run}: look into the log of the collector, and "
                "whether this is the Prometheus that it writes to"
            )
        rules = {
            str(rule.get("name")): str(rule.get("lastError") or "")
            for group in mappings(self._ask("rules").get("groups"))
            for rule in mappings(group.get("rules"))
        }
        if alert not in rules:
            return f"{alert} is not loaded: load deploy/prometheus/alerts of this version"
        if failing := sorted(f"{name} ({error})" for name, error in rules.items() if error):
            return f"rules fail: {'; '.join(failing)}"
        if self._series("ALERTS", alertname=alert, run=run):
            return f"{alert} is pending: wait longer (--seconds)"
        return (
            f"{alert} is loaded and has found nothing: load deploy/prometheus/rules of this "
            "version, and see that no label is dropped on the way"
        )

    def _series(self, name: str, **labels: str) -> list[Mapping[str, Any]]:
        chosen = ",".join(f"{label}={json.dumps(text)}" for label, text in labels.items())
        return mappings(self._ask("query", query=f"{name}{{{chosen}}}").get("result"))

    def _ask(self, what: str, **asked: str) -> Mapping[str, Any]:
        request = Request(f"{self._address}/api/v1/{what}?{urlencode(asked)}")
        if self._authorization:
            request.add_header("Authorization", self._authorization)
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                told = files.parse_json(answer.read(_MOST_BYTES))
        except HTTPError as error:
            with error:
                raise NoAnswer(f"{self.name}: {error.code} {one_line(error.reason)}") from None
        except (OSError, http.client.HTTPException) as error:
            why = error.reason if isinstance(error, URLError) else error
            raise NoAnswer(f"{self.name}: no answer ({one_line(str(why))})") from None
        except ValueError:
            told = None
        data = told.get("data") if isinstance(told, dict) else None
        if not isinstance(data, dict):
            raise NoAnswer(f"{self.name} is no Prometheus: is another server there?")
        return data
