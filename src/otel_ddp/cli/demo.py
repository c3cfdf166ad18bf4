"""otel-ddp demo: two DDP ranks on the CPU, and what the node recorded of them."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

from otel_ddp import catalog
from otel_ddp.demo.injection import ACCIDENTS, PHASES, TROUBLE_AT, Injection, parse
from otel_ddp.journal.place import Place
from otel_ddp.survey import survey

_AGENT_PATIENCE_S = 30.0
_NEWS_EVERY_S = 5.0
_VERDICT_PATIENCE_S = 3.5
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to train")
    parser.add_argument("--ranks", type=int, default=2, help="how many processes")
    parser.add_argument(
        "--inject",
        default="",
        metavar="TROUBLE",
        help="what goes wrong after a while: backward:1:30ms (rank 1 is 30 ms late in backward; "
        f"also {', '.join(PHASES)}), or {', '.join(ACCIDENTS)} and a rank, such as hang:1",
    )


def run(asked: argparse.Namespace) -> int:
    try:
        injected = parse(asked.inject)
    except ValueError as why:
        print(why, file=sys.stderr)
        return 2
    if injected.what and injected.rank >= asked.ranks:
        print(f"There is no rank {injected.rank} among {asked.ranks}.", file=sys.stderr)
        return 2
    # A place of its own: nothing of the user's is touched, and nothing stays.
    memory = Path("/dev/shm")
    root = Path(tempfile.mkdtemp(prefix="otel_ddp-demo-", dir=memory if memory.is_dir() else None))
    place = Place(root / "place")
    try:
        return _train(place, root, asked, injected)
    finally:
        _stop_agent(place)
        shutil.rmtree(root, ignore_errors=True)


def _train(place: Place, root: Path, asked: argparse.Namespace, injected: Injection) -> int:
    env = {
        **os.environ,
        "OTEL_DDP_DIR": str(place.directory),
        "OTEL_DDP_SPOOL_DIR": str(root / "spool"),
        "OTEL_DDP_POSTMORTEM_DIR": str(root / "postmortems"),
        # Nobody wants to watch a stall for a minute.
        "OTEL_DDP_STALL_TIMEOUT_S": os.environ.get("OTEL_DDP_STALL_TIMEOUT_S", "5"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(asked.ranks)),
        *("-m", "otel_ddp.demo.training", str(asked.seconds), asked.inject),
    ]
    print(f"Training on {asked.ranks} ranks for {asked.seconds:g} s ...", flush=True)
    if injected.what:
        print(f"After {TROUBLE_AT} steps, on purpose: {asked.inject}", flush=True)
    # Of a rank that is killed on purpose, torchrun has more to say than anybody wants to read.
    quiet = subprocess.DEVNULL if injected.deadly else None
    training = subprocess.Popen(command, env=env, stderr=quiet)
    try:
        url = _endpoint(place, training)
        if url:
            print(f"Look:  curl {url}")
            print(f"       otel-ddp status --dir {place.directory}", flush=True)
        gives_up_at = time.monotonic() + asked.seconds
        held: list[tuple[float, dict[int, int]]] = []
        status = None
        while status is None:
            try:
                status = training.wait(_NEWS_EVERY_S)
            except subprocess.TimeoutExpired:  # noqa: PERF203
                if url:
                    print(_news(url), flush=True)
                if injected.what == "leak":
                    held.append((time.monotonic(), _held_bytes(place)))
                # Whoever hangs on purpose does not come to an end.
                if injected.what == "hang" and time.monotonic() > gives_up_at:
                    break
        verdicts = _verdicts(place, injected)
    finally:
        if training.poll() is None:
            training.terminate()
            training.wait()
    if not url or (status and not injected.deadly):
        print("The training failed." if status else "No agent answered.", file=sys.stderr)
        return status or 1
    print("\nRecorded, as the node's endpoint tells it:")
    print("\n".join(_summary(_samples(url))))
    print("\nVerdicts:")
    print("\n".join(f"  {sentence}" for sentence in verdicts) or "  none")
    if len(held) > 1:
        print(f"\n{_grown(*held[0], *held[-1])}")
    return 0


def _verdicts(place: Place, injected: Injection) -> list[str]:
    """What the agent has found; of a death it tells once it has seen it."""
    if injected.what == "kill":
        # The kernel tells the signal once the launcher has taken note of the death.
        time.sleep(_VERDICT_PATIENCE_S)
    try:
        told = json.loads(place.agent_file.read_text()).get("told", [])
    except (OSError, ValueError):
        told = []
    return [str(each) for each in told]


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


def _grown(first_at: float, first: dict[int, int], last_at: float, last: dict[int, int]) -> str:
    """What was seen of a leak: it takes longer than most demos until there is a verdict on it."""
    told = ", ".join(
        f"rank {rank} {(last[rank] - first[rank]) / (1 << 20):+.0f} MiB"
        for rank in sorted(first.keys() & last.keys())
    )
    return (
        f"Memory grew in the last {last_at - first_at:.0f} s: {told}.\nA verdict on memory that "
        "creeps needs more than ten minutes of it: --seconds 900."
    )


def _endpoint(place: Place, training: subprocess.Popen[bytes]) -> str:
    """Where the agent serves; it is up a moment after the first rank."""
    deadline = time.monotonic() + _AGENT_PATIENCE_S
    while time.monotonic() < deadline and training.poll() is None:
        try:
            said = json.loads(place.agent_file.read_text())
        except (OSError, ValueError):
            time.sleep(0.1)
            continue
        if said.get("remark"):
            print(f"Note:  {said['remark']}")
        return str(said.get("scrape") or "")
    return ""


class Sample:
    """One line of the exposition."""

    __slots__ = ("labels", "name", "value")

    def __init__(self, name: str, labels: dict[str, str], value: float) -> None:
        self.name, self.labels, self.value = name, labels, value


def _samples(url: str) -> list[Sample]:
    from otel_ddp.agent.exposition import parse

    with urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    return [Sample(*each) for each in parse(text)]


def _of(samples: list[Sample], metric: catalog.Metric, **labels: str) -> Iterator[Sample]:
    for sample in samples:
        if sample.name == metric.prometheus and labels.items() <= sample.labels.items():
            yield sample


def _news(url: str) -> str:
    samples = _samples(url)
    ranks = [
        f"rank {each.labels['rank']}: step {steps:.0f}, loss {each.value:.3f}"
        for each in _of(samples, catalog.TRAINING_SCALAR, name="loss")
        for steps in [_first(samples, catalog.TRAINING_STEP, rank=each.labels["rank"])]
    ]
    return "  " + " | ".join(sorted(ranks))


def _first(samples: list[Sample], metric: catalog.Metric, **labels: str) -> float:
    return next((each.value for each in _of(samples, metric, **labels)), float("nan"))


def _summary(samples: list[Sample]) -> Iterator[str]:
    words = {code: word for word, code in catalog.STATES.items()}
    for info in _of(samples, catalog.TRAINING_RUN_INFO):
        labels = info.labels
        yield f"  run {labels['run']}, group {labels['group']}, job_type {labels['job_type']}"
        config = [key for key in sorted(labels) if key.startswith("config_")]
        yield "  " + ", ".join(f"{key} = {labels[key]}" for key in config)
    for state in sorted(_of(samples, catalog.TRAINING_STATE), key=lambda each: each.labels["rank"]):
        rank = state.labels["rank"]
        yield f"  rank {rank} on {state.labels['node']}: {words.get(int(state.value))}"
        for metric, name in (
            (catalog.TRAINING_STEP, "last step"),
            (catalog.OTEL_DDP_RECORDS_LOST, "records lost"),
        ):
            yield f"    {name:24} {_first(samples, metric, rank=rank):.0f}"
        for each in _of(samples, catalog.TRAINING_SCALAR, rank=rank):
            name = f"{each.labels['name']} ({each.labels['split']})"
            yield f"    {name:24} {each.value:.4f}"
        for each in _of(samples, catalog.TRAINING_PHASE_TIME, rank=rank):
            yield f"    {'time in ' + each.labels['phase']:24} {each.value:.3f} s"
    yield f"  {len(samples)} series in all"


def _stop_agent(place: Place) -> None:
    pid = place.agent_pid()
    if not pid:
        return
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 5.0
    while place.agent_lives() and time.monotonic() < deadline:
        time.sleep(0.02)
