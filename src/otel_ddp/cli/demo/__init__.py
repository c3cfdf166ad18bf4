"""otel-ddp demo: trains on the CPU, shows what the node recorded, and checks that alerts fire."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from otel_ddp import settings
from otel_ddp.cli.demo.check import PLAYED, WAITS_S, Prometheus, play
from otel_ddp.cli.demo.injection import FAULTS, PHASES, TROUBLE_AT, Injection, parse
from otel_ddp.cli.demo.played import Played, end_by_signals
from otel_ddp.cli.node.status import table
from otel_ddp.cli.text import number
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"how long to train (default: {_SHOWN_S:g}); with --check, how long to wait for each "
        f"alert (default: {WAITS_S:g})",
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="how many processes (default: %(default)s)"
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
        server = Prometheus.at(options.check) if options.check else None
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
    return play(server, injected, options.ranks, options.seconds or WAITS_S)


def _injection(text: str, options: argparse.Namespace) -> Injection:
    injected = parse(text)
    if injected.what and injected.rank >= options.ranks:
        last = options.ranks - 1
        raise ValueError(
            f"There is no rank {injected.rank} among {options.ranks}: ranks are 0 to {last}."
        )
    return injected


def _show(options: argparse.Namespace, injected: Injection) -> int:
    """Train for a while, and print what was recorded; the exit status."""
    seconds = options.seconds or _SHOWN_S
    print(f"Training on {options.ranks} ranks for {seconds:g} s ...", flush=True)
    if injected.what:
        print(f"After {TROUBLE_AT} steps, on purpose: {options.inject}", flush=True)
    with Played(_RUN, seconds, options.ranks, injected) as played:
        _tell_where(played)
        status = _watch(played, seconds)
        verdicts = played.verdicts()
        if status and not injected.deadly:
            print(played.errors(), end="", file=sys.stderr)
            print("The training failed.", file=sys.stderr)
            return status
        ranks, now_ns = survey([played.place]).processes, time.time_ns()
    print("\nRecorded, as `otel-ddp status` shows it:")
    print("\n".join(table(("demo", _RUN), ranks, now_ns)))
    print("\nVerdicts:")
    print("\n".join(f"  {sentence}" for sentence in verdicts) or "  none")
    print(f"\nThe page has ended with the demo. Longer: --seconds {_LONGER_S}")
    return 0


def _watch(played: Played, seconds: float) -> int | None:
    """Show the progress until the end; the exit status."""
    gives_up_at = time.monotonic() + seconds
    while True:
        try:
            return played.process.wait(_PROGRESS_EVERY_S)
        except subprocess.TimeoutExpired:  # noqa: PERF203
            if news := " | ".join(_progress(played)):
                print(f"  {news}", flush=True)
            # A training that hangs on purpose does not end by itself.
            if played.injected.what == "hang" and time.monotonic() > gives_up_at:
                return None


def _progress(played: Played) -> Iterator[str]:
    """Each rank's step and loss."""
    ranks = [each for each in survey([played.place]).processes if each.rank is not None]
    for each in sorted(ranks, key=lambda one: one.rank or 0):
        losses = [row.get("last") for row in each.summary or () if row.get("name") == "loss"]
        loss = number(losses[0].get("value")) if losses and losses[0] else None
        yield f"rank {each.rank}: step {each.step}" + ("" if loss is None else f", loss {loss:.3f}")


def _tell_where(played: Played) -> None:
    agent = played.first_agent()
    if remark := agent.get("remark"):
        print(f"Note:  {remark}")
    if page := addresses.page(played.place):
        print(f"Look:  {addresses.page_of_run(page, _RUN)}", flush=True)
        if tunnel := addresses.tunnel(page, os.environ):
            print(f"       from your machine: {tunnel}", flush=True)
    print(f"       otel-ddp status --dir {played.place.directory}", flush=True)
    if url := agent.get("scrape"):
        print(f"       curl {url}", flush=True)
