"""otel-ddp demo: trains on the CPU, shows what the node recorded, and checks that alerts fire."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from otel_ddp import settings
from otel_ddp.cli.demo.check import ALERTS, PLAYED, NoAnswer, Prometheus
from otel_ddp.cli.demo.injection import FAULTS, PHASES, TROUBLE_AT, Injection, parse
from otel_ddp.cli.demo.played import Played, end_by_signals
from otel_ddp.cli.demo.report import progress, samples, summary
from otel_ddp.errors import ConfigError
from otel_ddp.identity import addresses
from otel_ddp.journal.survey import survey

_RUN = "demo"
_NO_TORCH = (
    "The demo trains with PyTorch, which is not installed for this Python: pip install '.[torch]' "
    "in the folder of otel_ddp, or pip install 'torch>=2.4'."
)
_PROGRESS_EVERY_S = 5.0
_SHOWN_S, _LONGER_S = 20.0, 600
# An alert fires within five minutes of its trouble.
_CHECKED_S, _LOOK_EVERY_S = 420.0, 1.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=_seconds,
        help=f"how long to train (default: {_SHOWN_S:g}); with --check, how long to wait for each "
        f"alert (default: {_CHECKED_S:g})",
    )
    parser.add_argument(
        "--ranks", type=_ranks, default=2, help="how many processes (default: %(default)s)"
    )
    parser.add_argument(
        "--check",
        metavar="URL",
        help="the Prometheus with the alerts: train until the alert on the trouble fires there; "
        f"without --inject {', '.join(PLAYED)} in turn. PROMETHEUS_TOKEN holds a bearer token",
    )
    parser.add_argument(
        "--inject",
        default="",
        metavar="TROUBLE",
        help="what goes wrong after a while: backward:1:30ms (rank 1 is 30 ms late in backward; "
        f"also {', '.join(PHASES)}), or {', '.join(FAULTS)} and a rank, such as hang:1 "
        "(default: nothing)",
    )


def run(options: argparse.Namespace) -> int:
    troubles = PLAYED if options.check and not options.inject else (options.inject,)
    try:
        disabled = settings.read().disabled
        injected = [_injection(text, options) for text in troubles]
        server = _server(options.check) if options.check else None
    except (ConfigError, ValueError) as why:
        print(why, file=sys.stderr)
        return 2
    if disabled:
        print("Nothing would be recorded: OTEL_SDK_DISABLED is set; unset it.", file=sys.stderr)
        return 2
    if importlib.util.find_spec("torch") is None:
        print(_NO_TORCH, file=sys.stderr)
        return 2
    end_by_signals()
    if server is None:
        return _show(options, injected[0])
    return _check(options, injected, server)


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(text)) < math.inf:
            return seconds
    raise argparse.ArgumentTypeError(f"must be a number above 0, got {text!r}")


def _ranks(text: str) -> int:
    with contextlib.suppress(ValueError):
        if (ranks := int(text)) >= 1:
            return ranks
    raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, got {text!r}")


def _injection(text: str, options: argparse.Namespace) -> Injection:
    injected = parse(text)
    if injected.what and injected.rank >= options.ranks:
        last = options.ranks - 1
        raise ValueError(
            f"There is no rank {injected.rank} among {options.ranks}: ranks are 0 to {last}."
        )
    if options.check and injected.what not in ALERTS:
        raise ValueError(
            f"No alert fires on {injected.what} within minutes. --check can wait for "
            f"{', '.join(ALERTS)}."
        )
    return injected


def _server(url: str) -> Prometheus:
    if not url.lower().startswith(("http://", "https://")):
        raise ValueError(f"--check needs an address that begins with http:// or https://: {url!r}")
    return Prometheus(url, os.environ.get("PROMETHEUS_TOKEN", "").strip())


def _check(options: argparse.Namespace, injected: list[Injection], server: Prometheus) -> int:
    """Play each trouble until its alert fires; the exit status."""
    failed = 0
    # Two agents that speak for one node would contradict each other: this one has its own name.
    node = {"OTEL_DDP_NODE": f"demo-{os.uname().nodename}"}
    limit_s = options.seconds or _CHECKED_S
    for each in injected:
        run_name = f"demo-{each.what}-{secrets.token_hex(3)}"
        alert = ALERTS[each.what]
        print(
            f"Playing {each.text} as {run_name}: at most {limit_s:g} s for {alert} ...", flush=True
        )
        began = time.monotonic()
        # It trains on until it is told to end.
        with Played(run_name, 2 * limit_s, options.ranks, each, **node) as played:
            why_not = _awaited(server, played, alert, began + limit_s)
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
    except NoAnswer as why:
        return str(why)
    return ""


def _show(options: argparse.Namespace, injected: Injection) -> int:
    """Train for a while, and print what was recorded; the exit status."""
    seconds = options.seconds or _SHOWN_S
    print(f"Training on {options.ranks} ranks for {seconds:g} s ...", flush=True)
    if injected.what:
        print(f"After {TROUBLE_AT} steps, on purpose: {options.inject}", flush=True)
    with Played(_RUN, seconds, options.ranks, injected) as played:
        status, held = _watch(played, seconds)
        verdicts = played.verdicts()
        if status and not injected.deadly:
            print(played.errors(), end="", file=sys.stderr)
            print("The training failed.", file=sys.stderr)
            return status
        if not (served := samples(played.endpoint())):
            print("The agent does not answer.", file=sys.stderr)
            return 1
        print("\nRecorded, as the node's endpoint serves it:")
        print("\n".join(summary(served)))
        print("\nVerdicts:")
        print("\n".join(f"  {sentence}" for sentence in verdicts) or "  none")
        if grown := what_grew(held):
            print(f"\n{grown}")
        print(f"\nThe page has ended with the demo. Longer: --seconds {_LONGER_S}")
    return 0


def _watch(played: Played, seconds: float) -> tuple[int | None, list[tuple[float, dict[int, int]]]]:
    """Show the progress until the end: the exit status, and each rank's memory over time."""
    _tell_where(played)
    gives_up_at = time.monotonic() + seconds
    held: list[tuple[float, dict[int, int]]] = []
    while True:
        try:
            return played.process.wait(_PROGRESS_EVERY_S), held
        except subprocess.TimeoutExpired:  # noqa: PERF203
            if news := progress(samples(played.endpoint())):
                print(news, flush=True)
            if played.injected.what == "leak":
                held.append((time.monotonic(), _held_bytes(played)))
            # A training that hangs on purpose does not end by itself.
            if played.injected.what == "hang" and time.monotonic() > gives_up_at:
                return None, held


def _tell_where(played: Played) -> None:
    agent: Mapping[str, object] = played.first_agent()
    if remark := agent.get("remark"):
        print(f"Note:  {remark}")
    page = addresses.page(played.place)
    if page:
        print(f"Look:  {addresses.page_of_run(page, _RUN)}", flush=True)
        if tunnel := addresses.tunnel(page, os.environ):
            print(f"       from your machine: {tunnel}", flush=True)
    print(f"       otel-ddp status --dir {played.place.directory}", flush=True)
    if url := agent.get("scrape"):
        print(f"       curl {url}", flush=True)


def _held_bytes(played: Played) -> dict[int, int]:
    """The resident memory of each rank that can be read."""
    found = {}
    for each in survey([played.place]).processes:
        try:
            pages = Path(f"/proc/{each.pid}/statm").read_text().split()[1]
        except OSError:
            continue
        found[each.rank or 0] = int(pages) * _PAGE_BYTES
    return found


def what_grew(held: list[tuple[float, dict[int, int]]]) -> str:
    """How the memory grew: a verdict on a leak takes longer than most demos."""
    changes = []
    # One rank may begin later than another, and end earlier.
    for rank in sorted({rank for _, ranks in held for rank in ranks}):
        sizes = [(at, ranks[rank]) for at, ranks in held if rank in ranks]
        (first_at, first), (last_at, last) = sizes[0], sizes[-1]
        if last_at > first_at:
            grown = (last - first) / (1 << 20)
            changes.append(f"rank {rank} {grown:+.0f} MiB in {last_at - first_at:.0f} s")
    if not changes:
        return ""
    return (
        f"Memory grew: {', '.join(changes)}.\nA verdict on creeping memory needs more than ten "
        "minutes: --seconds 900."
    )
