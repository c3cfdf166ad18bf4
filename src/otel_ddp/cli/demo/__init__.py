"""otel-ddp demo: trains with two DDP ranks on the CPU, and shows what the node recorded."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from otel_ddp import settings
from otel_ddp.agent.reading.node_status import survey
from otel_ddp.cli.demo.injection import FAULTS, PHASES, TROUBLE_AT, Injection, parse
from otel_ddp.cli.demo.report import progress, samples, summary
from otel_ddp.cli.temporary_place import (
    agent_description,
    end_by_signals,
    new_directory,
    stop_agent,
)
from otel_ddp.cli.text import dated, integer, mappings
from otel_ddp.errors import ConfigError
from otel_ddp.identity import page_address
from otel_ddp.journal.place import Place

_PREFIX = "otel_ddp-demo-"
_RUN = "demo"
_NO_TORCH = (
    "The demo trains with PyTorch, which is not installed for this Python: pip install '.[torch]' "
    "in the folder of otel_ddp, or pip install 'torch>=2.4'."
)
_AGENT_STARTS_S = 30.0
_PROGRESS_EVERY_S = 5.0
_VERDICT_S = 3.5
_LONGER_S = 600
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# The user's variables that belong to another training: its identity and its agent.
_NOT_PASSED_ON = (
    *("OTEL_DDP_AGENT", "OTEL_DDP_STRATEGY", "OTEL_DDP_LINGER_S"),
    *("OTEL_DDP_RUN", "OTEL_DDP_INHERITED_RUN", "OTEL_DDP_RANK", "OTEL_DDP_LOCAL_RANK"),
    *("OTEL_DDP_WORLD_SIZE", "OTEL_DDP_NODE_RANK"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--seconds", type=_seconds, default=20.0, help="how long to train (default: %(default)g)"
    )
    parser.add_argument(
        "--ranks", type=_ranks, default=2, help="how many processes (default: %(default)s)"
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
    try:
        injected = parse(options.inject)
        disabled = settings.read().disabled
    except (ConfigError, ValueError) as why:
        print(why, file=sys.stderr)
        return 2
    if injected.what and injected.rank >= options.ranks:
        last = options.ranks - 1
        print(
            f"There is no rank {injected.rank} among {options.ranks}: ranks are 0 to {last}.",
            file=sys.stderr,
        )
        return 2
    if disabled:
        print("Nothing would be recorded: OTEL_SDK_DISABLED is set; unset it.", file=sys.stderr)
        return 2
    if importlib.util.find_spec("torch") is None:
        print(_NO_TORCH, file=sys.stderr)
        return 2
    end_by_signals()
    # A directory of its own: nothing of the user's is changed, and nothing stays.
    root = new_directory(_PREFIX)
    place = Place(root / "place")
    try:
        return _train(place, root, options, injected)
    finally:
        # A second Ctrl-C would leave an agent behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        stop_agent(place)
        shutil.rmtree(root, ignore_errors=True)


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


def _train(place: Place, root: Path, options: argparse.Namespace, injected: Injection) -> int:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(options.ranks)),
        *("-m", "otel_ddp.cli.demo.training", str(options.seconds), options.inject),
    ]
    print(f"Training on {options.ranks} ranks for {options.seconds:g} s ...", flush=True)
    if injected.what:
        print(f"After {TROUBLE_AT} steps, on purpose: {options.inject}", flush=True)
    errors = root / "training.log"
    with errors.open("wb") as log:
        # torchrun prints pages about a killed rank or Ctrl-C: shown only if the training fails.
        training = subprocess.Popen(
            command, env=_environment(place, root), stderr=log, start_new_session=True
        )
    try:
        status, held = _watch(place, training, options.seconds, injected)
        verdicts = _verdicts(place, injected)
    finally:
        if training.poll() is None:
            training.terminate()
            training.wait()
    if status and not injected.deadly:
        print(errors.read_text(errors="replace"), end="", file=sys.stderr)
        print("The training failed.", file=sys.stderr)
        return status
    if not (served := samples(_endpoint(place))):
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


def _environment(place: Place, root: Path) -> dict[str, str]:
    return {
        **{name: text for name, text in os.environ.items() if name not in _NOT_PASSED_ON},
        "OTEL_DDP_DIR": str(place.directory),
        "OTEL_DDP_RUN": _RUN,
        "OTEL_DDP_SPOOL_DIR": str(root / "spool"),
        "OTEL_DDP_POSTMORTEM_DIR": str(root / "postmortems"),
        "OTEL_DDP_HISTORY_DIR": str(root / "history"),
        # The default of a minute is too long for a demo.
        "OTEL_DDP_STALL_TIMEOUT_S": os.environ.get("OTEL_DDP_STALL_TIMEOUT_S", "5"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _watch(
    place: Place, training: subprocess.Popen[bytes], seconds: float, injected: Injection
) -> tuple[int | None, list[tuple[float, dict[int, int]]]]:
    """Show the progress until the end: the exit status, and each rank's memory over time."""
    url = _first_endpoint(place, training)
    page = page_address.base(place)
    if page:
        print(f"Look:  {page_address.of_run(page, _RUN)}", flush=True)
        if tunnel := page_address.tunnel(page, os.environ):
            print(f"       from your machine: {tunnel}", flush=True)
    print(f"       otel-ddp status --dir {place.directory}", flush=True)
    if url:
        print(f"       curl {url}", flush=True)
    gives_up_at = time.monotonic() + seconds
    held: list[tuple[float, dict[int, int]]] = []
    while True:
        try:
            return training.wait(_PROGRESS_EVERY_S), held
        except subprocess.TimeoutExpired:  # noqa: PERF203
            if news := progress(samples(_endpoint(place))):
                print(news, flush=True)
            if injected.what == "leak":
                held.append((time.monotonic(), _held_bytes(place)))
            # A training that hangs on purpose does not end by itself.
            if injected.what == "hang" and time.monotonic() > gives_up_at:
                return None, held


def _verdicts(place: Place, injected: Injection) -> list[str]:
    """The agent's verdicts; that on a death comes a moment after it."""
    if injected.what == "kill":
        # The kernel reports the signal once the launcher has waited for the dead process.
        time.sleep(_VERDICT_S)
    described, now_ns = agent_description(place), time.time_ns()
    found = [each for key in ("past", "verdicts") for each in mappings(described.get(key))]
    found.sort(key=lambda each: integer(each.get("since_ns")) or 0)
    return [dated(each, now_ns) for each in found]


def _held_bytes(place: Place) -> dict[int, int]:
    """The resident memory of each rank that can be read."""
    found = {}
    for each in survey([place])["processes"]:
        try:
            pages = Path(f"/proc/{each['pid']}/statm").read_text().split()[1]
        except OSError:
            continue
        found[int(each["rank"])] = int(pages) * _PAGE_BYTES
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


def _first_endpoint(place: Place, training: subprocess.Popen[bytes]) -> str:
    """The agent's endpoint; the agent starts a moment after the first rank."""
    deadline = time.monotonic() + _AGENT_STARTS_S
    while time.monotonic() < deadline and training.poll() is None:
        if agent := agent_description(place):
            if agent.get("remark"):
                print(f"Note:  {agent['remark']}")
            return str(agent.get("scrape") or "")
        time.sleep(0.1)
    return ""


def _endpoint(place: Place) -> str:
    """The endpoint now: an agent that was killed is started again, perhaps on another port."""
    return str(agent_description(place).get("scrape") or "")
