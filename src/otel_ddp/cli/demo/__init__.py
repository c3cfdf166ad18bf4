"""otel-ddp demo: trains on the CPU and shows what the node recorded."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator

from otel_ddp import plain, settings
from otel_ddp.cli.demo.injection import (
    FAULTS,
    PHASES,
    SLOW_NODE,
    TROUBLE_AT,
    Injection,
    parse,
)
from otel_ddp.cli.demo.played import Played
from otel_ddp.cli.node.picture import heading, ranks
from otel_ddp.cli.text import end_by_signals
from otel_ddp.errors import ConfigError, MissingDependency
from otel_ddp.identity import addresses
from otel_ddp.journal import process_state
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import survey

_RUN = "demo"
_NO_TORCH = (
    "The demo trains with PyTorch, which is not installed for this Python: pip install "
    "'torch>=2.4'. After `uvx` or `pipx run`, add `--with torch`."
)
_PROGRESS_EVERY_S = 5.0
_SHOWN_S, _LONGER_S = 20.0, 600
# Nodes are compared over a longer time than the ranks of one.
_SHOWN_OF_NODES_S = 45.0
_MOST_NODES = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds",
        type=float,
        help=f"how long to train (default: {_SHOWN_S:g}, on several nodes {_SHOWN_OF_NODES_S:g})",
    )
    parser.add_argument(
        "--ranks", type=int, default=2, help="how many processes on a node (default: %(default)s)"
    )
    parser.add_argument(
        "--nodes",
        type=int,
        default=1,
        help="how many nodes are played here, each with an agent of its own (default: %(default)s)",
    )
    parser.add_argument(
        "--inject",
        default="",
        metavar="TROUBLE",
        help="what goes wrong after a while: backward:1:30ms (rank 1 is 30 ms late in backward; "
        f"also {', '.join(PHASES)}), or {', '.join(FAULTS)} and a rank, such as hang:1, or "
        f"{SLOW_NODE}:1 (all ranks of node 1 are late) (default: nothing)",
    )


def run(options: argparse.Namespace) -> int:
    injected = _injection(options.inject, options)
    if settings.read().disabled:
        raise ConfigError("Nothing would be recorded: OTEL_SDK_DISABLED is set; unset it.")
    if importlib.util.find_spec("torch") is None:
        raise MissingDependency(_NO_TORCH)
    end_by_signals()
    return _show(options, injected)


def _injection(text: str, options: argparse.Namespace) -> Injection:
    if not 1 <= options.nodes <= _MOST_NODES:
        raise ConfigError(f"--nodes is a number from 1 to {_MOST_NODES}.")
    injected = parse(text)
    what, count = "rank", options.ranks * options.nodes
    if injected.what == SLOW_NODE:
        what, count = "node", options.nodes
        if count == 1:
            raise ConfigError("One node alone is not slower than others: add --nodes 2.")
    if injected.what and injected.rank >= count:
        raise ConfigError(
            f"There is no {what} {injected.rank} among {count}: {what}s are 0 to {count - 1}."
        )
    return injected


def _show(options: argparse.Namespace, injected: Injection) -> int:
    """Train for a while, and print what was recorded; the exit status."""
    nodes = options.nodes
    seconds = options.seconds or (_SHOWN_S if nodes == 1 else _SHOWN_OF_NODES_S)
    each = "" if nodes == 1 else f" on each of {nodes} nodes"
    print(f"Training on {options.ranks} ranks{each} for {seconds:g} s ...", flush=True)
    if injected.what:
        print(f"After {TROUBLE_AT} steps, on purpose: {options.inject}", flush=True)
    with Played(_RUN, seconds, options.ranks, injected, nodes) as played:
        _tell_where(played)
        status = _watch(played, seconds)
        verdicts = played.verdicts()
        if status and not injected.deadly:
            print(played.errors(), end="", file=sys.stderr)
            print("The training failed.", file=sys.stderr)
            return status
        processes, now_ns = _processes(played), time.time_ns()
    print("\nRecorded, as `otel-ddp status` shows it:")
    print(heading(("demo", _RUN), processes))
    print("\n".join(line.text for line in ranks(processes, now_ns)))
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
    ranks = [each for each in _processes(played) if each.rank is not None]
    for each in sorted(ranks, key=lambda one: one.rank or 0):
        losses = [row.get("last") for row in each.summary or () if row.get("name") == "loss"]
        loss = plain.number(losses[0].get("value")) if losses and losses[0] else None
        yield f"rank {each.rank}: step {each.step}" + ("" if loss is None else f", loss {loss:.3f}")


def _processes(played: Played) -> list[ProcessState]:
    """Those of all nodes."""
    found = (each for place in played.places for each in survey([place]).processes)
    return process_state.table(found)


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
