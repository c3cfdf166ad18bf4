"""Plays troubles, and asks a Prometheus whether their alerts fire, and if not, why."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

from otel_ddp import files
from otel_ddp.agent.export.otlp import is_loopback, take_user, without_credentials
from otel_ddp.cli import fetch
from otel_ddp.cli.demo.injection import PHASES, SLOW_NODE, Injection
from otel_ddp.cli.demo.played import Played
from otel_ddp.cli.text import mappings
from otel_ddp.vocabulary import catalog

# A trouble, and the alert that it must raise.
ALERTS = {
    **dict.fromkeys((*PHASES, SLOW_NODE), "TrainingStraggler"),
    "hang": "TrainingStalled",
    "kill": "TrainingRunKilled",
    "nan": "TrainingLossNotFinite",
    "imbalance": "TrainingImbalance",
}
# What is played where no trouble is named: one of each kind.
PLAYED = ("backward:1:30ms", "hang:1", "kill:1")
# An alert fires within five minutes of its trouble.
WAITS_S, _LOOK_EVERY_S = 420.0, 1.0
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
    def at(cls, url: str) -> Prometheus:
        """That of --check; raises ValueError."""
        if not url.lower().startswith(("http://", "https://")):
            raise ValueError(
                f"--check needs an address that begins with http:// or https://: {url!r}"
            )
        return cls(url, os.environ.get("PROMETHEUS_TOKEN", "").strip())

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
        if self._series("ALERTS", alertname=alert, run=run):
            return f"{alert} is pending: wait longer (--seconds)"
        return (
            f"{alert} has found nothing: load deploy/prometheus/alerts and rules of this version, "
            f"see {self.name}/rules for errors, and that no label is dropped on the way"
        )

    def _series(self, name: str, **labels: str) -> list[Mapping[str, Any]]:
        chosen = ",".join(f"{label}={json.dumps(text)}" for label, text in labels.items())
        query = urlencode({"query": f"{name}{{{chosen}}}"})
        url = f"{self._address}/api/v1/query?{query}"
        try:
            # The proxy of a cluster has another loopback.
            answer = fetch.get(url, self._headers, answer_s=_ANSWER_S, by_proxy=not self._is_here)
        except fetch.NoAnswer as why:
            raise fetch.NoAnswer(f"{self.name}: {why}") from None
        status, body = answer
        if status != HTTPStatus.OK:
            raise fetch.NoAnswer(f"{self.name} answers {status}")
        told = None
        with contextlib.suppress(ValueError):
            told = files.parse_json(body)
        data = told.get("data") if isinstance(told, dict) else None
        if not isinstance(data, dict):
            raise fetch.NoAnswer(f"{self.name} is no Prometheus: is another server there?")
        return mappings(data.get("result"))


def play(
    server: Prometheus, injected: Sequence[Injection], ranks: int, wait_s: float, nodes: int = 1
) -> int:
    """Play each trouble until its alert fires; the exit status."""
    failed = 0
    # Two agents that speak for one node would contradict each other: this one has its own name.
    node = {"OTEL_DDP_NODE": f"demo-{os.uname().nodename}"}
    for each in injected:
        run_name = f"demo-{each.what}-{secrets.token_hex(3)}"
        alert = ALERTS[each.what]
        print(
            f"Playing {each.text} as {run_name}: at most {wait_s:g} s for {alert} ...", flush=True
        )
        began = time.monotonic()
        # It trains on until it is told to end.
        with Played(run_name, 2 * wait_s, ranks, each, nodes, **node) as played:
            why_not = _awaited(server, played, alert, began + wait_s)
            played.end()
        failed += bool(why_not)
        state = f"FAIL {why_not}" if why_not else f"ok   {alert} fires"
        print(f"  {state}, after {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(injected) - failed} of {len(injected)} alerts fired.")
    return 1 if failed else 0


def _awaited(server: Prometheus, played: Played, alert: str, deadline: float) -> str:
    """Why the alert does not fire; empty once it does."""
    try:
        while not server.fires(alert, played.run):
            if played.process.poll() is not None and not played.injected.deadly:
                return f"the training failed: {played.last_error()}"
            if time.monotonic() > deadline:
                return server.why_not(alert, played.run)
            time.sleep(_LOOK_EVERY_S)
    except fetch.NoAnswer as why:
        return str(why)
    return ""
