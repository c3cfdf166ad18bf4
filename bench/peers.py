"""What otel_ddp costs beside its peers, by turns in one run: `make peers` prints the table.

Each peer is used as its own documentation tells for a machine without its server. One that is not
installed, or fails, has no figures, and the reason stands below the table. Names of loggers as
arguments: only these.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Timer
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from node import Node  # noqa: E402
from otlp_receiver import Receiver  # noqa: E402

ROUNDS, STEP_ROUNDS = 3, 7
_PATIENCE_S = 60.0


class Logger(NamedTuple):
    """What logs values: pieces of a program."""

    name: str
    package: str
    imports: str
    start: str
    """Defines `log(values, step)` for a dictionary of floats, or of tensors."""
    tensors: str
    """The expression that it is given a dictionary `tensors` as."""
    end: str


ITEMS = "{name: each.item() for name, each in tensors.items()}"
LOGGERS = (
    Logger(
        "otel_ddp",
        "otel_ddp",
        "import otel_ddp",
        """
run = otel_ddp.init(run="bench")
def log(values, step):
    run.log(values, step=step)
""",
        "tensors",
        "run.finish()",
    ),
    Logger(
        "prometheus-client",
        "prometheus_client",
        "from prometheus_client import Gauge, start_http_server",
        """
start_http_server(0, "127.0.0.1")
kept = [Gauge(name, name, ["run", "rank"]).labels("bench", "0") for name in floats]
def log(values, step):
    for gauge, value in zip(kept, values.values()):
        gauge.set(value)
""",
        ITEMS,
        "",
    ),
    Logger(
        "OpenTelemetry SDK",
        "opentelemetry.sdk",
        """
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
""",
        """
reader = PeriodicExportingMetricReader(OTLPMetricExporter())
provider = MeterProvider([reader])
meter = provider.get_meter("bench")
labels = {"run": "bench", "rank": "0"}
kept = [meter.create_gauge(name) for name in floats]
def log(values, step):
    for gauge, value in zip(kept, values.values()):
        gauge.set(value, labels)
""",
        ITEMS,
        "provider.shutdown()",
    ),
    Logger(
        "W&B, offline",
        "wandb",
        "import wandb",
        """
run = wandb.init(project="bench", mode="offline", settings=wandb.Settings(silent=True))
def log(values, step):
    run.log(values, step=step)
""",
        "tensors",
        "run.finish()",
    ),
    Logger(
        "SwanLab, offline",
        "swanlab",
        "import swanlab",
        """
swanlab.init(project="bench", mode="offline")
def log(values, step):
    swanlab.log(values, step=step)
""",
        ITEMS,
        "swanlab.finish()",
    ),
    Logger(
        "MLflow, files",
        "mlflow",
        "import mlflow",
        """
os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
mlflow.set_tracking_uri("file://" + os.getcwd() + "/mlruns")
mlflow.start_run()
def log(values, step):
    mlflow.log_metrics(values, step=step)
""",
        ITEMS,
        "mlflow.end_run()",
    ),
    Logger(
        "TensorBoard",
        "tensorboard",
        "from torch.utils.tensorboard import SummaryWriter",
        """
writer = SummaryWriter("logs")
def log(values, step):
    for name, value in values.items():
        writer.add_scalar(name, value, step)
""",
        "tensors",
        "writer.close()",
    ),
)

BARE = Logger("bare", "torch", "", "def log(values, step): pass", "tensors", "")

# Torch is there before: a training program has it anyway.
PROGRAM = """
import itertools, json, os, statistics, time
import torch
torch.set_num_threads(1)
floats = {{f"metric_{{i}}": i * 0.1 for i in range(10)}}
tensors = {{f"tensor_{{i}}": torch.tensor(i * 0.1) for i in range(10)}}
clock = time.perf_counter
threads = len(os.listdir("/proc/self/task"))
began = clock()
{imports}
imported = clock() - began
began = clock()
{start}
log(floats, 0)
started = clock() - began
# Helpers that were started are up by then.
time.sleep(2.0)

steps = itertools.count(1)

def each(make, most_s=0.5, most=2000):
    took, until = [], clock() + most_s
    while len(took) < most and clock() < until:
        before = clock()
        log(make(), next(steps))
        took.append(clock() - before)
    return statistics.median(took) * 1e6

of_floats = each(lambda: floats)
of_tensors = each(lambda: {tensors})
threads = len(os.listdir("/proc/self/task")) - threads
links = (f"/proc/self/fd/{{each}}" for each in os.listdir("/proc/self/fd"))
sockets = sum("socket" in os.readlink(each) for each in links if os.path.lexists(each))
{end}
found = {{"import": imported * 1000}}
found |= dict(start=started * 1000, floats=of_floats, tensors=of_tensors, threads=threads,
             sockets=sockets)
print("found " + json.dumps(found), flush=True)
"""

# The processor time of a small program that logs for as long as it takes, all helpers included.
CALM = """
import os, sys, time
import torch
floats = {{f"metric_{{i}}": i * 0.1 for i in range(10)}}
tensors = {{}}
print("ready", flush=True)
sys.stdin.readline()
{imports}
{start}
log(floats, 0)
# Helpers that were started are up by then.
time.sleep(2.0)
print("started", flush=True)
sys.stdin.readline()
for step in range(1, 200):
    log(floats, step)
    time.sleep(0.025)
print("logged", flush=True)
sys.stdin.readline()
began = time.perf_counter()
{end}
print("found", (time.perf_counter() - began) * 1000)
"""


# One of several ranks that log much. It ends when it is told to. Torch is there before, as above.
BUSY = """
import os, sys, time
import torch
floats = {{f"metric_{{i}}": i * 0.1 for i in range(5)}}
tensors = {{}}
{imports}
{start}
log(floats, 0)
print("ready", flush=True)
sys.stdin.readline()
began = time.perf_counter()
step = 0
while time.perf_counter() - began < 10.0:
    step += 1
    log(floats, step)
    time.sleep(max(0.0, began + step / 100 - time.perf_counter()))
print("logged", flush=True)
sys.stdin.readline()
{end}
"""
RANKS = 8


class Follower(NamedTuple):
    """What follows the steps of a training: pieces of a program."""

    name: str
    package: str
    start: str
    around: str
    """The context that a step runs in."""
    server: tuple[str, ...] = ()
    """What has to run beside it: a module and its arguments, the last of them a folder."""


FOLLOWERS = (
    Follower("bare", "torch", "", "contextlib.nullcontext()"),
    Follower(
        "otel_ddp",
        "otel_ddp",
        "import otel_ddp\notel_ddp.instrument(model)",
        "contextlib.nullcontext()",
    ),
    Follower(
        "TraceML",
        "traceml_ai",
        'import traceml_ai\ntraceml_ai.init(mode="auto", on_missing_aggregator="raise")',
        "traceml_ai.trace_step(model)",
        ("traceml_ai.launcher.cli", "serve", "--logs-dir"),
    ),
    Follower(
        "torchtel",
        "torchtel",
        "from torchtel import PyTorchInstrumentor\nPyTorchInstrumentor().instrument(model=model)",
        "contextlib.nullcontext()",
    ),
)
STEPS = """
import contextlib, os, statistics, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.ones(64, 256)
{start}
took, clock = [], time.perf_counter
for number in range(3000):
    before = clock()
    with {around}:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
    took.append(clock() - before)
print("found", statistics.quantiles(took[500:], n=4)[0] * 1e6, flush=True)
os._exit(0)
"""


class Failed(Exception):
    """A program of a peer did not come to its end."""


def program(node: Node, code: str, folder: str) -> str:
    """What it found."""
    process = node.start(sys.executable, "-c", f"import os\nos.chdir({folder!r})\n{code}")
    try:
        said, _ = process.communicate(timeout=_PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise Failed("it took longer than a minute") from None
    lines = [line for line in said.splitlines() if line.startswith("found ")]
    if not lines:
        raise Failed((said.strip().splitlines() or ["no word"])[-1])
    return lines[-1].partition(" ")[2]


def _processes(node: Node) -> Iterator[Path]:
    """They have its directory in their environment."""
    mark = f"OTEL_DDP_DIR={node.env['OTEL_DDP_DIR']}".encode()
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (each / "environ").read_bytes():
                yield each


def cpu_s(node: Node) -> float:
    """Of all processes of this node."""
    found = 0.0
    for each in _processes(node):
        with contextlib.suppress(OSError):
            fields = (each / "stat").read_text().rpartition(")")[2].split()
            found += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return found


def memory_mb(node: Node) -> float:
    """Of all processes of this node, what they share counted once."""
    found = 0.0
    for each in _processes(node):
        with contextlib.suppress(OSError):
            for line in (each / "smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    found += int(line.split()[1]) / 1000
    return found


def calm(node: Node, logger: Logger, folder: str) -> dict[str, float]:
    """The processor time of the start and of all, in s, and how long the end took, in ms."""
    code = CALM.format(imports=logger.imports, start=logger.start, end=logger.end)
    process = node.start(sys.executable, "-c", f"import os\nos.chdir({folder!r})\n{code}")

    late = Timer(_PATIENCE_S, process.kill)
    late.start()

    def heard(word: str) -> str:
        for line in process.stdout or ():
            if line.startswith(word):
                return line[len(word) :]
        raise Failed(f"it did not come to {word!r}")

    def go_on() -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    try:
        heard("ready")
        before = cpu_s(node)
        go_on()
        heard("started")
        start = cpu_s(node) - before
        go_on()
        heard("logged")
        took = cpu_s(node) - before
        go_on()
        return {"start_cpu": start, "cpu": took, "end": float(heard("found"))}
    except BrokenPipeError:
        raise Failed("it has ended too early") from None
    finally:
        late.cancel()


@contextlib.contextmanager
def _node(endpoint: str, folder: str) -> Iterator[Node]:
    with Node() as node:
        node.export_to(endpoint)
        # No name is asked for, and nothing is looked for in the network.
        node.env |= {"WANDB_MODE": "offline", "SWANLAB_MODE": "offline", "HOME": folder}
        yield node


def busy(logger: Logger, endpoint: str, folder: str) -> dict[str, float]:
    """Of 8 ranks that log 5 values 100 times a second: what all processes take.

    The share of a core, and the memory in MB. What such ranks take by themselves is subtracted.
    """
    found = []
    for each in (BARE, logger):
        with _node(endpoint, folder) as node:
            found.append(_busy(node, each, folder))
    bare, taken = found
    return {f"busy_{key}": taken[key] - bare[key] for key in taken}


def _busy(node: Node, logger: Logger, folder: str) -> dict[str, float]:
    code = BUSY.format(imports=logger.imports, start=logger.start, end=logger.end)
    ranks = []
    for number in range(RANKS):
        rank = {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS)}
        os.makedirs(f"{folder}/{number}", exist_ok=True)
        inside = f"import os\nos.chdir({folder!r} + '/{number}')\n{code}"
        ranks.append(node.start(sys.executable, "-c", inside, env=rank))
    late = Timer(2 * _PATIENCE_S, lambda: [each.kill() for each in ranks])
    late.start()
    try:
        for word in ("ready", "logged"):
            for rank in ranks:
                if not any(line.startswith(word) for line in rank.stdout or ()):
                    raise Failed(f"one of {RANKS} ranks did not come to {word!r}")
            if word == "ready":
                before = cpu_s(node)
                for rank in ranks:
                    _tell(rank)
        found = {"cpu": (cpu_s(node) - before) * 10.0, "memory": memory_mb(node)}
        for rank in ranks:
            _tell(rank)
            rank.wait(_PATIENCE_S)
        return found
    finally:
        late.cancel()


def _tell(process: Any) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


def measured(names: Sequence[str], failed: dict[str, str]) -> dict[str, dict[str, float]]:
    """What was seen of each logger: medians of all rounds."""
    seen: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(ROUNDS):
        for logger in (each for each in LOGGERS if each.name in names):
            if logger.name in failed:
                continue
            with Receiver() as receiver, tempfile.TemporaryDirectory() as folder:
                endpoint = receiver.start_http()
                try:
                    with _node(endpoint, folder) as node:
                        code = PROGRAM.format(**logger._asdict())
                        found = json.loads(program(node, code, folder))
                    # Another node: an agent that is there already would cost nothing to start.
                    with _node(endpoint, folder) as node:
                        found |= calm(node, logger, folder)
                    if not number:
                        found |= busy(logger, endpoint, folder)
                except Failed as why:
                    failed[logger.name] = str(why)
                    continue
            for key, value in found.items():
                seen[logger.name][key].append(value)
    return {
        name: {key: statistics.median(values) for key, values in of_name.items()}
        for name, of_name in seen.items()
    }


def of_steps(failed: dict[str, str]) -> dict[str, float]:
    """The lower quartile of a step, of each follower, and the same of all rounds."""
    seen: dict[str, list[float]] = defaultdict(list)
    for _ in range(STEP_ROUNDS):
        for each in FOLLOWERS:
            if each.name in failed or not is_there(each.package, each.name, failed):
                continue
            with Receiver() as receiver, Node() as node, tempfile.TemporaryDirectory() as folder:
                node.export_to(receiver.start_http())
                node.env["HOME"] = folder
                if each.server:
                    node.start(sys.executable, "-m", *each.server, folder)
                try:
                    code = STEPS.format(start=each.start, around=each.around)
                    seen[each.name].append(float(program(node, code, folder)))
                except Failed as why:
                    failed[each.name] = str(why)
    return {name: statistics.quantiles(values, n=4)[0] for name, values in seen.items()}


def is_there(package: str, name: str, failed: dict[str, str]) -> bool:
    try:
        found = importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        failed[name] = "it is not installed"
    return found


# What it is called, its unit, its digits, and what we want of ours.
ROWS = (
    ("floats", "a call with ten floats", "us", 2, "x0.4 of prometheus-client"),
    ("tensors", "a call with ten scalar tensors of the CPU", "us", 2, "5 us"),
    ("import", "its import, after torch's", "ms", 1, "1 ms"),
    ("start", "from there to the first value", "ms", 0, "20 ms"),
    (
        "start_cpu",
        "processor time of both and of two seconds after, helpers included",
        "s",
        2,
        "0.01 s",
    ),
    ("end", "the end, after 200 calls in 5 s", "ms", 0, "100 ms"),
    ("cpu", "processor time before that end, helpers included", "s", 2, ""),
    (
        "busy_cpu",
        f"{RANKS} ranks, 100 calls a second with 5 values each: share of a core beyond the bare "
        "ranks'",
        "%",
        1,
        "2 %",
    ),
    ("busy_memory", "their memory beyond the bare ranks'", "MB", 0, "45 MB"),
    ("threads", "threads that it adds to the training process", "", 0, "0"),
    ("sockets", "its sockets there", "", 0, "0"),
)


def main() -> None:
    failed: dict[str, str] = {}
    asked = sys.argv[1:] or [each.name for each in LOGGERS]
    names = [
        each.name
        for each in LOGGERS
        if each.name in asked and is_there(each.package, each.name, failed)
    ]
    seen = measured(names, failed)
    shown = [name for name in names if name in seen and name not in failed]
    print(f"| what | ours at most | {' | '.join(shown)} |\n|---|---|{'---|' * len(shown)}")
    for key, what, unit, digits, limit in ROWS:
        cells = [f"{seen[name][key]:.{digits}f} {unit}".strip() for name in shown]
        print(f"| {what} | {limit} | {' | '.join(cells)} |")
    if not sys.argv[1:]:
        steps = of_steps(failed)
        bare = steps.pop("bare")
        print(f"\n| a DDP step of {bare:.0f} us, one rank | more |\n|---|---|")
        for name, took in steps.items():
            print(f"| {name} | {took - bare:+.0f} us |")
    for name, why in failed.items():
        print(f"\n{name}: {why}.")


if __name__ == "__main__":
    main()
