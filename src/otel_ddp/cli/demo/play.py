"""otel-ddp demo: trains on the CPU and shows what the node recorded."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from otel_ddp import plain, settings
from otel_ddp.cli.demo.injection import (
    FAULTS,
    PHASES,
    SLOW_NODE,
    TROUBLE_AT,
    Injection,
    parse,
)
from otel_ddp.cli.picture import heading, ranks
from otel_ddp.cli.text import dated, end_by_signals
from otel_ddp.errors import ConfigError, MissingDependency
from otel_ddp.identity import addresses
from otel_ddp.journal import process_state
from otel_ddp.journal.place import Place
from otel_ddp.journal.process_state import ProcessState
from otel_ddp.journal.survey import survey, told_by_agent

_RUN = "demo"
_PREFIX = "otel_ddp-demo-"
_NO_TORCH = (
    "The demo trains with PyTorch, which is not installed for this Python: pip install "
    "'torch>=2.4'. After `uvx` or `pipx run`, add `--with torch`."
)
_PROGRESS_EVERY_S = 5.0
_SHOWN_S, _LONGER_S = 20.0, 600
# Nodes are compared over a longer time than the ranks of one.
_SHOWN_OF_NODES_S = 45.0
_MOST_NODES = 8
# The first import of torch in a new environment may take a minute.
_AGENT_STARTS_S = 120.0
_VERDICT_S = 3.5
# It writes its history and exports once more, on a machine that may be busy.
_AGENT_ENDS_S = 30.0
# The user's variables that belong to another training: its identity and its agent.
_NOT_PASSED_ON = (
    *("OTEL_DDP_AGENT", "OTEL_DDP_STRATEGY", "OTEL_DDP_LINGER_S"),
    *("OTEL_DDP_INHERITED_RUN", "OTEL_DDP_RANK", "OTEL_DDP_LOCAL_RANK"),
    *("OTEL_DDP_WORLD_SIZE", "OTEL_DDP_NODE_RANK"),
)


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
    seconds = options.seconds or (_SHOWN_S if options.nodes == 1 else _SHOWN_OF_NODES_S)
    each = "" if options.nodes == 1 else f" on each of {options.nodes} nodes"
    print(f"Training on {options.ranks} ranks{each} for {seconds:g} s ...", flush=True)
    if injected.what:
        print(f"After {TROUBLE_AT} steps, on purpose: {options.inject}", flush=True)
    with _played(options, seconds) as nodes:
        # Its agent leads, and the launchers of the other nodes end when its own does.
        lead = nodes[0]
        _tell_where(lead)
        status = _watch(nodes, seconds, hangs=injected.what == "hang")
        if injected.what == "kill":
            # The kernel reports the signal once the launcher has waited for the dead process.
            time.sleep(_VERDICT_S)
        told, now_ns = told_by_agent(lead.place), time.time_ns()
        if status and not injected.deadly:
            print("".join(node.errors() for node in nodes), end="", file=sys.stderr)
            print("The training failed.", file=sys.stderr)
            return status
        processes = _processes(nodes)
    print("\nRecorded, as `otel-ddp status` shows it:")
    print(heading(("demo", _RUN), processes))
    print("\n".join(line.text for line in ranks(processes, now_ns)))
    print("\nVerdicts:")
    verdicts = [f"  {dated(verdict, now_ns)}" for verdict in (*told.past, *told.verdicts)]
    print("\n".join(verdicts or ["  none"]))
    print(f"\nThe page has ended with the demo. Longer: --seconds {_LONGER_S}")
    return 0


def _watch(nodes: Sequence[_Node], seconds: float, *, hangs: bool) -> int | None:
    """Show the progress until the end; the exit status."""
    gives_up_at = time.monotonic() + seconds
    while True:
        try:
            return nodes[0].training.wait(_PROGRESS_EVERY_S)
        except subprocess.TimeoutExpired:  # noqa: PERF203
            if news := " | ".join(_progress(nodes)):
                print(f"  {news}", flush=True)
            # A training that hangs on purpose does not end by itself.
            if hangs and time.monotonic() > gives_up_at:
                return None


def _progress(nodes: Sequence[_Node]) -> Iterator[str]:
    """Each rank's step and loss."""
    ranks = [each for each in _processes(nodes) if each.rank is not None]
    for each in sorted(ranks, key=lambda one: one.rank or 0):
        losses = [row.get("last") for row in each.summary or () if row.get("name") == "loss"]
        loss = plain.number(losses[0].get("value")) if losses and losses[0] else None
        yield f"rank {each.rank}: step {each.step}" + ("" if loss is None else f", loss {loss:.3f}")


def _processes(nodes: Sequence[_Node]) -> list[ProcessState]:
    found = (each for node in nodes for each in survey([node.place]).processes)
    return process_state.table(found)


def _tell_where(lead: _Node) -> None:
    agent = lead.agent()
    if remark := agent.get("remark"):
        print(f"Note:  {remark}")
    if page := addresses.page(lead.place):
        print(f"Look:  {addresses.page_of_run(page, _RUN)}", flush=True)
        if tunnel := addresses.tunnel(page, os.environ):
            print(f"       from your machine: {tunnel}", flush=True)
    print(f"       otel-ddp status --dir {lead.place.directory}", flush=True)
    if url := agent.get("scrape"):
        print(f"       curl {url}", flush=True)


# -- what is played


@contextlib.contextmanager
def _played(options: argparse.Namespace, seconds: float) -> Iterator[list[_Node]]:
    """A training with its trouble on nodes that are played here; afterwards nothing is left."""
    try:
        root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/dev/shm"))
    except OSError:
        root = Path(tempfile.mkdtemp(prefix=_PREFIX))
    nodes: list[_Node] = []
    try:
        port = _free_port()
        for number in range(options.nodes):
            command = [
                *(sys.executable, "-m", "torch.distributed.run"),
                *(f"--nnodes={options.nodes}", f"--node-rank={number}"),
                *("--master-addr=127.0.0.1", f"--master-port={port}"),
                *(f"--nproc-per-node={options.ranks}", "-m", "otel_ddp.cli.demo.training"),
                *(str(seconds), options.inject),
            ]
            nodes.append(_Node(root / f"node-{number}", command))
        yield nodes
    finally:
        # A second Ctrl-C would leave processes behind.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for each in nodes:
                each.end()
            shutil.rmtree(root, ignore_errors=True)
        finally:
            signal.signal(signal.SIGINT, before)


class _Node:
    """One node in a directory of its own: torchrun and its ranks, and their agent."""

    def __init__(self, root: Path, command: Sequence[str]) -> None:
        root.mkdir()
        self.place = Place(root / "place")
        self._log = root / "training.log"
        own = {
            "OTEL_DDP_RUN": _RUN,
            "OTEL_DDP_NODE": root.name,
            "OTEL_DDP_DIR": str(self.place.directory),
            "OTEL_DDP_SPOOL_DIR": str(root / "spool"),
            "OTEL_DDP_HISTORY_DIR": str(root / "history"),
        }
        defaults = {
            # That of a minute is too long for a demo.
            "OTEL_DDP_STALL_TIMEOUT_S": "5",
            # On a busy machine the budget is for one step in 16: too few to name a rank in 20 s.
            "OTEL_DDP_OVERHEAD": "all",
            "OMP_NUM_THREADS": "1",
        }
        passed = {name: text for name, text in os.environ.items() if name not in _NOT_PASSED_ON}
        with self._log.open("wb") as log:
            # torchrun prints pages about a killed rank or Ctrl-C: shown only where it fails.
            self.training = subprocess.Popen(
                command, env={**defaults, **passed, **own}, stderr=log, start_new_session=True
            )

    def errors(self) -> str:
        """What its ranks and their launcher printed as errors."""
        return self._log.read_text(errors="replace")

    def agent(self) -> Mapping[str, Any]:
        """How the agent describes itself; it starts a moment after the first rank."""
        deadline = time.monotonic() + _AGENT_STARTS_S
        while time.monotonic() < deadline and self.training.poll() is None:
            if agent := told_by_agent(self.place).agent:
                return agent
            time.sleep(0.1)
        return {}

    def end(self) -> None:
        """End the training; then its agent, and wait for its last export."""
        if self.training.poll() is None:
            self.training.terminate()
            self.training.wait()
        if not (pid := self.place.agent_pid()):
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + _AGENT_ENDS_S
        while self.place.agent_is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
