"""Plays troubles, and asks a Prometheus whether their alerts fire, and if not, why."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence

from otel_ddp.cli import fetch
from otel_ddp.cli.demo.injection import PHASES, SLOW_NODE, Injection
from otel_ddp.cli.demo.played import Played
from otel_ddp.cli.programs.prometheus import Prometheus
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


def fires(server: Prometheus, alert: str, run: str) -> bool:
    """Whether the alert fires for this run."""
    return bool(server.series("ALERTS", alertname=alert, alertstate="firing", run=run))


def why_not(server: Prometheus, alert: str, run: str) -> str:
    """What is missing on the way to the alert, and where to look."""
    if not server.series(catalog.TRAINING_STATE.prometheus, run=run):
        return (
            f"{server.name} has no series of {run}: look into the log of the collector, and "
            "whether this is the Prometheus that it writes to"
        )
    if server.series("ALERTS", alertname=alert, run=run):
        return f"{alert} is pending: wait longer (--seconds)"
    return (
        f"{alert} has found nothing: load deploy/prometheus/alerts and rules of this version, "
        f"see {server.name}/rules for errors, and that no label is dropped on the way"
    )


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
            missing = _awaited(server, played, alert, began + wait_s)
            played.end()
        failed += bool(missing)
        state = f"FAIL {missing}" if missing else f"ok   {alert} fires"
        print(f"  {state}, after {time.monotonic() - began:.0f} s", flush=True)
    print(f"{len(injected) - failed} of {len(injected)} alerts fired.")
    return 1 if failed else 0


def _awaited(server: Prometheus, played: Played, alert: str, deadline: float) -> str:
    """Why the alert does not fire; empty once it does."""
    try:
        while not fires(server, alert, played.run):
            if played.process.poll() is not None and not played.injected.deadly:
                return f"the training failed: {played.last_error()}"
            if time.monotonic() > deadline:
                return why_not(server, alert, played.run)
            time.sleep(_LOOK_EVERY_S)
    except fetch.NoAnswer as why:
        return str(why)
    return ""
