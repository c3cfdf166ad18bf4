"""otel-ddp demo: two DDP ranks on the CPU, and what the node recorded of them."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from otel_ddp import settings
from otel_ddp.agent.node_status import survey
from otel_ddp.cli.demo.injection import ACCIDENTS, PHASES, TROUBLE_AT, Injection, parse
from otel_ddp.cli.recorded import progress, samples, summary
from otel_ddp.errors import ConfigError
from otel_ddp.journal.place import Place

_PREFIX = "otel_ddp-demo-"
_NO_TORCH = (
    "The demo trains with PyTorch, which is not installed for this Python: pip install '.[torch]' "
    "in the folder of otel_ddp, or pip install 'torch>=2.4'."
)
_AGENT_PATIENCE_S = 30.0
_NEWS_EVERY_S = 5.0
_VERDICT_PATIENCE_S = 3.5
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# What of the user's belongs to a training of theirs: who it is, and who runs its agent.
_NOT_OURS = (
    *("OTEL_DDP_AGENT", "OTEL_DDP_STRATEGY", "OTEL_DDP_LINGER_S"),
    *("OTEL_DDP_RUN", "OTEL_DDP_INHERITED_RUN", "OTEL_DDP_RANK", "OTEL_DDP_LOCAL_RANK"),
    *("OTEL_DDP_WORLD_SIZE", "OTEL_DDP_NODE_RANK"),
)


def arguments(parser: argparse.ArgumentParser) -> None:
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
        f"also {', '.join(PHASES)}), or {', '.join(ACCIDENTS)} and a rank, such as hang:1 "
        "(default: nothing)",
    )


def run(asked: argparse.Namespace) -> int:
    try:
        injected = parse(asked.inject)
        disabled = settings.read().disabled
    except (ConfigError, ValueError) as why:
        print(why, file=sys.stderr)
        return 2
    if injected.what and injected.rank >= asked.ranks:
        last = asked.ranks - 1
        print(
            f"There is no rank {injected.rank} among {asked.ranks}: ranks are 0 to {last}.",
            file=sys.stderr,
        )
        return 2
    if disabled:
        print("Nothing would be recorded: OTEL_SDK_DISABLED is set.", file=sys.stderr)
        return 2
    if importlib.util.find_spec("torch") is None:
        print(_NO_TORCH, file=sys.stderr)
        return 2
    for polite in (signal.SIGTERM, signal.SIGHUP):
        # Who is ended so clears up as well.
        signal.signal(polite, lambda number, _: sys.exit(128 + number))
    # A place of its own: nothing of the user's is touched, and nothing stays.
    root = _room()
    place = Place(root / "place")
    try:
        return _train(place, root, asked, injected)
    finally:
        # Somebody impatient presses Ctrl-C again, and would leave an agent behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _stop_agent(place)
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


def _room() -> Path:
    """A new directory, in memory where that can be written to."""
    with contextlib.suppress(OSError):
        return Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/dev/shm"))
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def _train(place: Place, root: Path, asked: argparse.Namespace, injected: Injection) -> int:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(asked.ranks)),
        *("-m", "otel_ddp.cli.demo.training", str(asked.seconds), asked.inject),
    ]
    print(f"Training on {asked.ranks} ranks for {asked.seconds:g} s ...", flush=True)
    if injected.what:
        print(f"After {TROUBLE_AT} steps, on purpose: {asked.inject}", flush=True)
    said = root / "training.log"
    with said.open("wb") as log:
        # Of a rank that is killed, or of Ctrl-C, torchrun says more than anybody wants to read.
        training = subprocess.Popen(
            command, env=_environment(place, root), stderr=log, start_new_session=True
        )
    try:
        status, held = _watch(place, training, asked.seconds, injected)
        verdicts = _verdicts(place, injected)
    finally:
        if training.poll() is None:
            training.terminate()
            training.wait()
    if status and not injected.deadly:
        print(said.read_text(errors="replace"), end="", file=sys.stderr)
        print("The training failed.", file=sys.stderr)
        return status
    if not (told := samples(_endpoint(place))):
        print("No agent answered.", file=sys.stderr)
        return 1
    print("\nRecorded, as the node's endpoint tells it:")
    print("\n".join(summary(told)))
    print("\nVerdicts:")
    print("\n".join(f"  {sentence}" for sentence in verdicts) or "  none")
    if grown := what_grew(held):
        print(f"\n{grown}")
    return 0


def _environment(place: Place, root: Path) -> dict[str, str]:
    return {
        **{name: text for name, text in os.environ.items() if name not in _NOT_OURS},
        "OTEL_DDP_DIR": str(place.directory),
        "OTEL_DDP_SPOOL_DIR": str(root / "spool"),
        "OTEL_DDP_POSTMORTEM_DIR": str(root / "postmortems"),
        # Nobody wants to watch a stall for a minute.
        "OTEL_DDP_STALL_TIMEOUT_S": os.environ.get("OTEL_DDP_STALL_TIMEOUT_S", "5"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _watch(
    place: Place, training: subprocess.Popen[bytes], seconds: float, injected: Injection
) -> tuple[int | None, list[tuple[float, dict[int, int]]]]:
    """Tell how it goes until it ends: its status, and what the ranks held when, for a leak."""
    if url := _first_endpoint(place, training):
        print(f"Look:  curl {url}")
        print(f"       otel-ddp status --dir {place.directory}", flush=True)
    gives_up_at = time.monotonic() + seconds
    held: list[tuple[float, dict[int, int]]] = []
    while True:
        try:
            return training.wait(_NEWS_EVERY_S), held
        except subprocess.TimeoutExpired:  # noqa: PERF203
            if news := progress(samples(_endpoint(place))):
                print(news, flush=True)
            if injected.what == "leak":
                held.append((time.monotonic(), _held_bytes(place)))
            # Whoever hangs on purpose does not come to an end.
            if injected.what == "hang" and time.monotonic() > gives_up_at:
                return None, held


def _verdicts(place: Place, injected: Injection) -> list[str]:
    """What the agent has found; of a death it tells once it has seen it."""
    if injected.what == "kill":
        # The kernel tells the signal once the launcher has taken note of the death.
        time.sleep(_VERDICT_PATIENCE_S)
    return [str(each) for each in _agent(place).get("told", [])]


def _held_bytes(place: Place) -> dict[int, int]:
    """What each rank holds in memory, of those that can be looked at."""
    found = {}
    for each in survey([place])["processes"]:
        try:
            pages = Path(f"/proc/{each['pid']}/statm").read_text().split()[1]
        except OSError:
            continue
        found[int(each["rank"])] = int(pages) * _PAGE_BYTES
    return found


def what_grew(held: list[tuple[float, dict[int, int]]]) -> str:
    """What was seen of a leak: it takes longer than most demos until there is a verdict on it."""
    told = []
    # One rank may begin later than another, and be gone earlier.
    for rank in sorted({rank for _, ranks in held for rank in ranks}):
        seen = [(at, ranks[rank]) for at, ranks in held if rank in ranks]
        (first_at, first), (last_at, last) = seen[0], seen[-1]
        if last_at > first_at:
            grown = (last - first) / (1 << 20)
            told.append(f"rank {rank} {grown:+.0f} MiB in {last_at - first_at:.0f} s")
    if not told:
        return ""
    return (
        f"Memory grew: {', '.join(told)}.\nA verdict on memory that creeps needs more than ten "
        "minutes of it: --seconds 900."
    )


def _first_endpoint(place: Place, training: subprocess.Popen[bytes]) -> str:
    """Where the agent serves; it is up a moment after the first rank."""
    deadline = time.monotonic() + _AGENT_PATIENCE_S
    while time.monotonic() < deadline and training.poll() is None:
        if said := _agent(place):
            if said.get("remark"):
                print(f"Note:  {said['remark']}")
            return str(said.get("scrape") or "")
        time.sleep(0.1)
    return ""


def _endpoint(place: Place) -> str:
    """Where it serves now: one that was killed is started again, perhaps on another port."""
    return str(_agent(place).get("scrape") or "")


def _agent(place: Place) -> dict[str, Any]:
    """What the agent says of itself; nothing while there is none."""
    try:
        said = json.loads(place.agent_file.read_text())
    except (OSError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _stop_agent(place: Place) -> None:
    pid = place.agent_pid()
    if not pid:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 5.0
    while place.agent_lives() and time.monotonic() < deadline:
        time.sleep(0.02)
