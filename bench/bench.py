"""What otel_ddp costs, measured here and now: `make bench` prints docs/internals/performance.md.

    python bench/bench.py               all of it
    python bench/bench.py log hooks     some parts
    python bench/bench.py --write       all of it, into that page and README.md too

Ratios and limits, not digits: run it on a quiet machine, and name the machine.
"""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from node import Node, finished, until  # noqa: E402
from nvml_boards import SOURCE, Boards, h100  # noqa: E402
from otlp_receiver import Receiver  # noqa: E402

Row = tuple[str, ...]
# By the number of a row's cells, the head of its table.
HEADS = {
    3: ("what", "limit", "measured"),
    8: (
        *("bare step", "empty hooks", "writing a word", "our other work"),
        *("flushes", "agent", "sum", "measured together"),
    ),
}

LOG = """
import gc, time
import otel_ddp
run = otel_ddp.init(run="bench")
values = {f"metric_{i}": i * 0.1 for i in range(10)}
for step in range(2000):
    run.log(values, step=step)
gc.collect()
took = []
clock = time.perf_counter_ns
empty = sorted(clock() - clock() for _ in range(2000))[1000]
for step in range(100_000):
    before = clock()
    run.log(values, step=step)
    took.append(clock() - before + empty)
    if step % 100 == 0:
        time.sleep(0.001)
took.sort()
print(took[50_000] / 1000, took[99_000] / 1000)
"""

# By turns in one process, so that all see the machine in the same hour.
BESIDE_GAUGES = """
import statistics, time
import otel_ddp
import torch
from prometheus_client import CollectorRegistry, Gauge
run = otel_ddp.init(run="bench")
floats = {f"metric_{i}": i * 0.1 for i in range(10)}
tensors = {f"tensor_{i}": torch.tensor(i * 0.1) for i in range(10)}
registry = CollectorRegistry()
gauges = [Gauge(name, name, ["run", "rank"], registry=registry) for name in floats]
kept = [gauge.labels("bench", "0") for gauge in gauges]
values = list(floats.values())
def log_floats(step):
    run.log(floats, step=step)
def log_tensors(step):
    run.log(tensors, step=step)
def set_kept(step):
    for gauge, value in zip(kept, values):
        gauge.set(value)
def set_labelled(step):
    for gauge, value in zip(gauges, values):
        gauge.labels("bench", "0").set(value)
turns = {each: [] for each in (log_floats, log_tensors, set_kept, set_labelled)}
clock = time.perf_counter_ns
for turn in range(210):
    for each, took in turns.items():
        before = clock()
        for step in range(200):
            each(step)
        took.append((clock() - before) / 200_000)
print(*(statistics.median(took[10:]) for took in turns.values()))
"""

START = """
import os, time
before = time.perf_counter()
import otel_ddp
run = otel_ddp.init(run="bench")
took = time.perf_counter() - before
import threading
sockets = [fd for fd in os.listdir("/proc/self/fd")
           if os.path.exists(f"/proc/self/fd/{fd}")
           and os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")]
print(took * 1000, len(threading.enumerate()) - 1, len(sockets))
"""

END = """
import time
import otel_ddp
run = otel_ddp.init(run="bench")
time.sleep(1.5)
for step in range(1000):
    run.log({"loss": step * 0.1}, step=step)
before = time.perf_counter()
run.finish()
print((time.perf_counter() - before) * 1000)
"""

RANK = """
import sys, time
import otel_ddp
rate, seconds, count = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
run = otel_ddp.init(run="bench")
values = {f"metric_{i}": i * 0.1 for i in range(count)}
began = time.perf_counter()
step = 0
while time.perf_counter() - began < seconds:
    run.log(values, step=step)
    step += 1
    time.sleep(max(0.0, began + step / rate - time.perf_counter()))
print(step)
run.finish()
"""


def log_cost() -> list[Row]:
    with Node(OTEL_DDP_JOURNAL_BYTES="2M") as node:
        rounds = [[float(each) for each in node.run(LOG).split()] for _ in range(3)]
    median = statistics.median(each[0] for each in rounds)
    late = statistics.median(each[1] for each in rounds)
    return [
        ("`run.log` of ten floats, median", "<= 3 us", f"{median:.2f} us"),
        ("`run.log` of ten floats, p99", "<= 10 us", f"{late:.2f} us"),
    ]


def cost_beside_gauges() -> list[Row]:
    with Node(OTEL_DDP_JOURNAL_BYTES="2M") as node:
        rounds = [[float(each) for each in node.run(BESIDE_GAUGES).split()] for _ in range(3)]
    floats, tensors, kept, labelled = (
        statistics.median(each) for each in zip(*rounds, strict=True)
    )
    what = "`run.log` of ten floats against ten `prometheus_client` gauges"
    return [
        (
            f"{what}, children kept",
            "<= x0.6",
            f"x{floats / kept:.2f} ({floats:.2f} us, {kept:.2f} us)",
        ),
        (
            f"{what}, `labels()` each time",
            "<= x0.3",
            f"x{floats / labelled:.2f} ({floats:.2f} us, {labelled:.2f} us)",
        ),
        ("`run.log` of ten CPU tensors", "<= 10 us", f"{tensors:.2f} us"),
    ]


def import_cost() -> list[Row]:
    def best(code: str) -> float:
        took = []
        for _ in range(15):
            before = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            took.append(time.perf_counter() - before)
        return statistics.quantiles(took, n=4)[0] * 1000

    bare, ours = best("pass"), best("import otel_ddp")
    return [("`import otel_ddp`", "<= 15 ms", f"{ours - bare:.1f} ms")]


def start_cost() -> list[Row]:
    took, threads, sockets = [], set(), set()
    for _ in range(7):
        with Node() as node:
            ms, thread, held = node.run(START).split()
        took.append(float(ms))
        threads.add(thread)
        sockets.add(held)
    return [
        (
            "import and `init()`, agent started",
            "<= 100 ms",
            f"{statistics.median(took):.0f} ms (worst {max(took):.0f})",
        ),
        (
            "threads at work, and sockets, in the training process",
            "none",
            f"{'/'.join(sorted(threads))} and {'/'.join(sorted(sockets))}",
        ),
    ]


AGREEMENT = """
import os, statistics, time
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg
from otel_ddp.identity.identity import resolve
from otel_ddp.torch import process_group

store = dist.TCPStore("127.0.0.1", 0, is_master=True)
dist.init_process_group("fake", store=store, rank=0, world_size=2)
clock, took = time.perf_counter, {}

def agree(name, **env):
    process = resolve(env={"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **env})
    before = clock()
    said = process_group.facts(process, seeks_lead=True)
    took.setdefault(name, []).append(clock() - before)
    return said

for number in range(1000):
    # A new launch in each round: no key is there.
    os.environ["TORCHELASTIC_RUN_ID"] = str(number)
    kept = agree("name", LOCAL_WORLD_SIZE="2"), agree("both", LOCAL_WORLD_SIZE="1")
    assert kept[0].lead is None and kept[1].lead is not None
print(*(statistics.median(each) * 1e6 for each in (took["name"], took["both"])))
"""


def agreement_cost() -> list[Row]:
    with Node(OTEL_DDP_AGENT="off") as node:
        name, both = (float(each) for each in node.run(AGREEMENT).split())
    return [
        (
            "start on several nodes: agreement on the lead",
            "<= 1000 us",
            f"{both - name:+.0f} us (run's name {name:.0f} us)",
        )
    ]


@contextmanager
def unroutable() -> Iterator[str]:
    """A port that neither accepts nor refuses: its queue of connections is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        crowd = []
        for _ in range(4):
            each = socket.socket()
            each.setblocking(False)
            each.connect_ex(address)
            crowd.append(each)
        yield f"http://127.0.0.1:{address[1]}"
        for each in crowd:
            each.close()


HOOKS = """
import logging; logging.getLogger('otel_ddp').setLevel('ERROR')
import statistics, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import otel_ddp
from otel_ddp.torch import measure
from otel_ddp.torch.hooks import model as model_hooks
from otel_ddp.torch.hooks import optimizer as optimizer_hooks

torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
inputs = torch.ones(4, 8)
run = otel_ddp.init(run="bench")
clock = time.perf_counter
for _ in range(200):
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()

# What each of them takes by itself, without torch's calling: a step's sequence, again and again.
queued = []
otel_ddp.instrument(model)
ours = measure._current.stepper
ours._queue_callback = queued.append
weight, gradient = torch.ones(8, 1, requires_grad=True), torch.ones(4, 1)
# Larger than the caches of a core: what a forward or a backward leaves of ours.
memory = torch.ones(16_000_000)
empty = statistics.median(clock() - clock() for _ in range(1000)) * -1

def in_turn(rounds, between=lambda: None):
    took = {}
    def timed(what, hook, *args):
        between()
        before = clock()
        hook(*args)
        took.setdefault(what, []).append(clock() - before)
    # The journal is written every quarter of a second: here after so many steps.
    flushed = []
    ours.progress.flush_due_ns = 2**62
    for number in range(rounds):
        if number % 100 == 99:
            before = clock()
            ours.progress.flush()
            flushed.append((clock() - before) / 100)
            ours.progress.flush_due_ns = 2**62
        output = inputs @ weight
        timed("before forward", model_hooks.before_forward, model, (inputs,), {})
        timed("after forward", model_hooks.after_forward, model, (inputs,), output)
        timed("first gradient", ours.backward_hook.hook, gradient)
        timed("gradients done", queued.pop())
        timed("backward ended", queued.pop())
        timed("before the optimizer", optimizer_hooks.before_step, optimizer, (optimizer,), {})
        timed("after the optimizer", optimizer_hooks.after_step, optimizer, (optimizer,), {})
    medians = {what: statistics.median(each[rounds // 6:]) - empty for what, each in took.items()}
    return {"its share of a flush of 100 steps": statistics.median(flushed), **medians}

for found in (in_turn(3000), in_turn(200, lambda: memory.mul_(1.0))):
    print(*(f"{what}:{seconds * 1e6}" for what, seconds in found.items()), sep=";")
"""


_COLD = ", each after 64 MB were read and written, as a forward or a backward may do"


def _hooks_by_themselves(where: str, printed: str) -> Row:
    parts = {
        what: float(us) for what, _, us in (each.partition(":") for each in printed.split(";"))
    }
    listed = ", ".join(f"{what} {us:.1f}" for what, us in parts.items())
    total = f"{sum(parts.values()):.1f} us"
    if not where:
        return "our hooks of one DDP step, alone", "<= 15 us", total
    return f"our hooks of one DDP step, alone{where}: {listed}", "", total


def hook_cost() -> list[Row]:
    with Node(OTEL_DDP_AGENT="off") as node:
        warm, cold = node.run(HOOKS).splitlines()
    return [_hooks_by_themselves(where, each) for where, each in (("", warm), (_COLD, cold))]


# One process, with our hooks and without them in turns of a few steps: two processes, and two
# seconds of one, differ by more than we take.
BUDGET = """
import logging; logging.getLogger('otel_ddp').setLevel('ERROR')
import json, statistics, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import otel_ddp
from otel_ddp.torch import measure
from otel_ddp.torch.hooks import optimizer as hooks

torch.set_num_threads(1)
dist.init_process_group("gloo")
if blocks := int(sys.argv[4]):
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    layers = [fully_shard(nn.Linear(128, 128), mesh=mesh) for _ in range(blocks)]
    model = fully_shard(nn.Sequential(*layers), mesh=mesh)
else:
    layers = (nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
    model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

def step_s():
    began = time.thread_time()
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()
    return time.thread_time() - began

target_s, seconds, steps = float(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
rows, inputs = 1, torch.randn(1, 128)
while True:
    took_s = torch.tensor(statistics.median(step_s() for _ in range(30)))
    dist.all_reduce(took_s, op=dist.ReduceOp.MAX)
    if took_s >= target_s * 0.95:
        break
    rows = int(rows * min(4.0, max(1.05, target_s / float(took_s))) + 1)
    inputs = torch.randn(rows, 128)
run = otel_ddp.instrument(model)
stepper = measure._current.stepper

# As many steps are measured by then as will be.
for _ in range(max(256, int(5 / target_s))):
    step_s()
counted, measured, turns = [], [], int(seconds / target_s / (2 * steps + 2))
began = time.monotonic()
for _ in range(turns):
    kept = dict(vars(stepper.cost.budget))
    stepper.switch_hooks(False)
    hooks._after.remove()
    hooks._after = None
    # Not the first one: what it runs is new in the caches.
    usual_s = statistics.median([step_s() for _ in range(steps + 1)][1:])
    hooks.attach(stepper)
    stepper.switch_hooks(stepper.measured)
    step_s()
    # A turn without us pays for no measured step.
    vars(stepper.cost.budget).update(kept)
    for _ in range(steps):
        (measured if stepper.measured else counted).append(step_s() - usual_s)
took_s = (time.monotonic() - began) / turns / (2 * steps + 2)
if dist.get_rank() == 0:
    print(json.dumps([took_s, counted, measured, stepper.cost.every]))
run.finish()
dist.destroy_process_group()
"""


def budget_cost() -> list[Row]:
    """The time of the training thread itself: of steps that are only counted, and of measured ones.

    What is written once a second, some 0.1 ms, is seen in neither.
    """
    rows: list[Row] = []
    for target_ms, steps, seconds, ranks, blocks in (
        (1, 8, 40, 1, 0),
        (2, 8, 40, 1, 0),
        (5, 8, 40, 1, 0),
        (20, 4, 60, 1, 0),
        (100, 2, 90, 1, 0),
        (50, 4, 30, 2, 60),
    ):
        # The memory of tensors stays with the process: its pages would cost as much as our hooks.
        with Node(
            OTEL_DDP_OVERHEAD="0.005",
            MALLOC_MMAP_THRESHOLD_="1000000000",
            MALLOC_TRIM_THRESHOLD_="1000000000",
        ) as node:
            given = (str(each) for each in (target_ms / 1000, seconds, steps, blocks))
            script = node.root / "budget.py"
            script.write_text(BUDGET)
            launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
            out = finished(node.start(sys.executable, *launch, str(script), *given), 600.0)
            took_s, counted, measured, every = json.loads(out.splitlines()[-1])
        (counted_s, error_s), (measured_s, measured_error_s) = map(_with_error, (counted, measured))
        more_s = counted_s * (1 - 1 / every) + measured_s / every
        more_error_s = math.hypot(error_s * (1 - 1 / every), measured_error_s / every)
        rows.append(
            (
                f"thread time of a step of {target_ms} ms"
                + (f" with FSDP2 of {blocks} blocks" if blocks else "")
                + ", more than bare",
                "<= 0.5 %",
                f"{more_s / took_s:+.2%} +-{more_error_s / took_s:.2%} of {took_s * 1e3:.2f} ms "
                f"(counted {counted_s * 1e6:+.1f} us, 1 of {every} measured "
                f"{measured_s * 1e6:+.0f} us)",
            )
        )
    return rows


def _with_error(found: Sequence[float]) -> tuple[float, float]:
    """And its error, from the quartiles."""
    if len(found) < 2:
        return 0.0, 0.0
    low, middle, high = statistics.quantiles(found, n=4)
    return middle, 0.93 * (high - low) / math.sqrt(len(found))


RATIO = """
import logging; logging.getLogger('otel_ddp').setLevel('ERROR')
import json, os, resource, signal, statistics, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook as after_step
from torch.optim.optimizer import register_optimizer_step_pre_hook as before_step
import otel_ddp
from otel_ddp.torch import measure
from otel_ddp.torch.steps.open_calls import BackwardHook

torch.set_num_threads(1)
dist.init_process_group("gloo")
target, agent_file, leads = float(sys.argv[1]), sys.argv[2], dist.get_rank() == 0
layers = (nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1))
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
clock = time.perf_counter

def train(steps):
    took = []
    for _ in range(steps):
        before = clock()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        took.append(clock() - before)
    return took

rows = 32
while True:
    inputs = torch.randn(rows, 128)
    train(20)
    slowest = torch.tensor(statistics.quantiles(train(60), n=4)[0])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    if slowest >= target * 0.9:
        break
    rows = int(rows * min(2.0, max(1.1, target / float(slowest))))

run = otel_ddp.init()
while leads and not os.path.exists(agent_file):
    time.sleep(0.1)
pid = json.load(open(agent_file))["agents"][0]["pid"] if leads else 0

def agent(number):
    if leads:
        os.kill(pid, number)

def agent_s():
    spent = [open(f"/proc/{pid}/task/{each}/schedstat").read().split()[0]
             for each in os.listdir(f"/proc/{pid}/task")] if leads else []
    return sum(map(int, spent)) / 1e9

# The same hooks of torch as ours, put on in the same way, with nothing in them.
queue_callback = torch.autograd.Variable._execution_engine.queue_callback
def nothing(*args): pass
def on_done(): queue_callback(nothing)
def on_gradient(gradient): queue_callback(on_done)
of_backward = BackwardHook()
of_backward.call(on_gradient)
def on_output(module, args, output): of_backward.put_on(output, output.grad_fn)

def hooks(before=nothing, after=on_output, update=nothing):
    handles = (
        model.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        model.register_forward_hook(after, prepend=True, always_call=True),
        before_step(update), after_step(update),
    )
    return lambda: [each.remove() for each in handles]

def writing():
    # The least that ours could do: each stores its word, and keeps it for the next flush.
    words, pending = memoryview(bytearray(4096)).cast("Q"), []
    keep, now = pending.append, time.monotonic_ns
    def write(*args):
        words[8] = word = 1 + now()
        keep(word)
    def done():
        write()
        queue_callback(write)
    def arrived(gradient):
        write()
        queue_callback(done)
    def returned(module, args, output):
        write()
        of_backward.put_on(output, output.grad_fn)
    of_backward.call(arrived)
    take_off = hooks(write, returned, write)
    return lambda: (take_off(), of_backward.call(on_gradient))

def ours():
    otel_ddp.instrument(model)
    return otel_ddp.uninstrument

def by_turns(kinds, rounds, measure_one):
    found = {kind: [] for kind in kinds}
    for number in range(rounds):
        at = number % len(kinds)
        for kind in [*kinds][at:] + [*kinds][:at]:
            take_off = kinds[kind]()
            found[kind].append(measure_one(kind))
            take_off()
    return found

# The hooks: a few steps each, as the cores change their speed within half a second, and by what
# they compute: what a step takes, its waiting included, differs far more from turn to turn.
def group(kind):
    train(2)
    before = time.thread_time()
    train(6)
    return [(time.thread_time() - before) / 6]

kinds = {"bare": lambda: nothing, "empty": hooks, "writing": writing, "ours": ours}
agent(signal.SIGSTOP)
groups = by_turns(kinds, 160, group)

# The agent: it wakes twice a second, so longer, and all steps count. Each of these turns is
# the beginning of what is measured, where flushes read more: by 2 to 5 us a step.
steps = int(0.5 / target)

def block(kind):
    if kind == "everything":
        agent(signal.SIGCONT)
    # The agent catches up meanwhile.
    train(steps)
    dist.barrier()
    then, agent_then, began = resource.getrusage(resource.RUSAGE_THREAD), agent_s(), clock()
    train(steps)
    step_s = (clock() - began) / steps
    used = resource.getrusage(resource.RUSAGE_THREAD)
    switches = used.ru_nvcsw + used.ru_nivcsw - then.ru_nvcsw - then.ru_nivcsw
    faults, by_agent_s = used.ru_minflt - then.ru_minflt, agent_s() - agent_then
    agent(signal.SIGSTOP)
    return [step_s, switches / steps, faults / steps, by_agent_s / steps]

kinds = {"bare": lambda: nothing, "without_agent": ours, "everything": ours}
blocks = by_turns(kinds, 20, block)

# The flushes, at the end of a step: each with the step after it, beside the two steps before. Less
# is read at them after the first twenty.
ours()
progress, spent, flushed = measure._current.stepper.progress, [], []
for number in range(int(12 / target)):
    due, before = progress.flush_due_ns, time.thread_time()
    train(1)
    spent.append(time.thread_time() - before)
    if progress.flush_due_ns != due:
        flushed.append(number)
share = len(flushed) / len(spent)
flushed = [at for at in flushed[20:] if at + 1 < len(spent)]
flushes = {
    "ours": [[spent[at] + spent[at + 1]] for at in flushed],
    "bare": [[spent[at - 1] + spent[at - 2]] for at in flushed],
}
agent(signal.SIGCONT)
if leads:
    print(json.dumps({"groups": groups, "blocks": blocks, "flushes": flushes, "share": share}))
run.finish()
dist.destroy_process_group()
"""


class More(NamedTuple):
    """What one way of measuring a step takes more than another, by turns."""

    us: float
    error_us: float

    def __str__(self) -> str:
        return f"{self.us:+.0f} ±{self.error_us:.0f}"


def _more(takes: list[list[float]], than: list[list[float]], column: int) -> More:
    """The mean of the middle half of all turns, and its standard error.

    A median of few turns jumps, and means of all follow each burst of the machine.
    """
    pairs = zip(takes, than, strict=True)
    more_us = sorted((some[column] - other[column]) * 1e6 for some, other in pairs)
    cut = len(more_us) // 4
    middle = more_us[cut : len(more_us) - cut]
    winsorised = [middle[0]] * cut + middle + [middle[-1]] * cut
    error_us = statistics.stdev(winsorised) * len(more_us) ** 0.5 / len(middle)
    return More(statistics.fmean(middle), error_us)


def _turns(ranks: int, target_s: float) -> dict[str, Any]:
    # The memory of tensors stays with the process: its pages would cost as much as our hooks.
    # Each step is measured here: `budget_cost` shows what is left of that.
    with Node(MALLOC_MMAP_THRESHOLD_="1000000000", MALLOC_TRIM_THRESHOLD_="1000000000") as node:
        script = node.root / "ratio.py"
        script.write_text(RATIO)
        launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        more = (str(script), str(target_s), str(node.place.agent_file))
        out = finished(node.start(sys.executable, *launch, *more), 600.0)
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


# What `block` returns.
_STEP, _SWITCHES, _FAULTS, _AGENT = range(4)


def _median(turns: list[list[float]], column: int) -> float:
    return statistics.median(each[column] for each in turns)


def step_ratio() -> list[Row]:
    ratios: list[Row] = []
    apart: list[Row] = []
    for ranks, target_s in ((2, 0.005), (2, 0.002), (1, 0.005)):
        found = _turns(ranks, target_s)
        groups, blocks = found["groups"], found["blocks"]
        bare_s = _median(blocks["bare"], _STEP)
        whole = _more(blocks["everything"], blocks["bare"], _STEP)
        where = "2 ranks" if ranks == 2 else "1 rank, a core left for the agent"
        ratios += [
            (
                f"a step of some {target_s * 1000:g} ms on {where}, each measured and everything "
                "on / bare",
                "",
                f"{1 + whole.us / 1e6 / bare_s:.4f} ({whole} us)",
            ),
            (
                "its switches of context, and page faults: bare; hooks without agent; everything",
                "",
                "; ".join(
                    f"{_median(each, _SWITCHES):.1f}, {_median(each, _FAULTS):.2f}"
                    for each in blocks.values()
                ),
            ),
        ]
        pairs = (("empty", "bare"), ("writing", "empty"), ("ours", "writing"))
        hooks = [_more(groups[kind], groups[than], 0) for kind, than in pairs]
        flush = _more(found["flushes"]["ours"], found["flushes"]["bare"], 0)
        flushes = More(*(each * found["share"] for each in flush))
        agent_us = _median(blocks["everything"], _AGENT) * 1e6
        together_us = sum(each.us for each in (*hooks, flushes)) + agent_us
        apart.append(
            (
                f"{bare_s * 1000:.1f} ms, {where}",
                *map(str, (*hooks, flushes)),
                *(f"{each:+.0f}" for each in (agent_us, together_us)),
                str(whole),
            )
        )
    return [*ratios, *apart]


GROWTH = """
import logging; logging.getLogger('otel_ddp').setLevel('ERROR')
import resource, sys
import torch
from torch import nn
import otel_ddp

torch.set_num_threads(1)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
inputs = torch.ones(4, 8)

def memory():
    # Without the pages of torch's libraries, of which each new operation touches some.
    ours = ("Pss_Anon:", "Pss_Shmem:")
    lines = [line.split() for line in open("/proc/self/smaps_rollup")]
    return sum(int(line[1]) for line in lines if line[0] in ours) / 1024

def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()

train(2000)
before = memory()
run = otel_ddp.instrument(model)
# Once round the journal's ring: its pages are there when they are first written to.
train(30_000)
on = memory()
train(100_000)
print(on - before, memory() - on)
run.finish()
"""


def memory_growth() -> list[Row]:
    with Node() as node:
        first, later = (float(each) for each in node.run(GROWTH).split())
    return [
        ("memory of a rank: hooks and journal", "<= 5 MB", f"{first:.1f} MB"),
        ("its growth over 100,000 steps", "0", f"{later:.1f} MB"),
    ]


VERDICTS = """
import os, signal, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import otel_ddp

torch.set_num_threads(1)
what, store, began = sys.argv[1:]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
inputs = torch.ones(4, 8)
run = otel_ddp.instrument(model, run=what)
for step in range(1, 100_000):
    if rank == 1 and step == 200:
        with open(began + ".new", "w") as file:
            file.write(str(time.time()))
        os.rename(file.name, began)
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    time.sleep(0.01)
    if rank == 1 and step >= 200:
        if what == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "stall":
            signal.pause()
        time.sleep(0.003)
    loss.backward()
    optimizer.step()
"""

STALL_LIMIT_S = 2.0


def _seen(what: str) -> tuple[float, int]:
    """From the start of the trouble at step 200 on: seconds until the verdict, and its step."""
    with Node(OTEL_DDP_STALL_TIMEOUT_S=f"{STALL_LIMIT_S:g}") as node:
        script, began = node.root / "train.py", node.root / "began"
        script.write_text(VERDICTS)
        for rank in "01":
            node.start(
                *(sys.executable, str(script), what, f"file://{node.root}/store", str(began)),
                env={"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"},
            )
        until(began.exists, "the trouble", 60.0)

        def verdicts_told() -> list[dict[str, Any]]:
            return [each for each in node.told().verdicts if each["kind"] == what]

        (verdict,) = until(verdicts_told, f"a {what}", 60.0)
        return time.time() - float(began.read_text()), verdict["step"]


def verdict_times() -> list[Row]:
    steps = [_seen("straggler")[1] - 200 for _ in range(3)]
    rows: list[Row] = [
        (
            "a rank of 2, a quarter late, until named",
            "<= 120 steps",
            f"{statistics.median(steps):.0f} steps (worst {max(steps)})",
        )
    ]
    for what, name, limit_s in (
        ("stall", f"a hanging rank, limit {STALL_LIMIT_S:g} s, until", STALL_LIMIT_S + 2),
        ("death", "a killed rank, until", 2.0),
    ):
        took = [_seen(what)[0] for _ in range(3)]
        measured = f"{statistics.median(took):.2f} s (worst {max(took):.2f})"
        rows.append((f"{name} reported", f"<= {limit_s:g} s", measured))
    return rows


def detector_cost(ranks: int = 8, rate: int = 100, steps: int = 2000) -> list[Row]:
    from tools.cases import labels_of
    from tools.diagnosis_cases import Case, simulated

    from otel_ddp.diagnosis.detector import Detector, Observation, RankState
    from otel_ddp.diagnosis.stall.detector import Stalls
    from otel_ddp.diagnosis.step_facts import facts_of
    from otel_ddp.diagnosis.straggler.detector import Stragglers

    # As the agent reads them: half a second of one rank, then of the next one.
    recorded = list(zip(*simulated(Case(ranks, 0.05, steps=steps)), strict=True))
    best_s = float("inf")
    for _ in range(5):
        stragglers = Stragglers()
        detectors: list[Detector] = [Stalls(), stragglers]
        states = [RankState(labels_of(rank), ranks) for rank in range(ranks)]
        before = time.process_time()
        for at in range(0, steps, rate // 2):
            for rank in range(ranks):
                read = recorded[rank][at : at + rate // 2]
                seen = Observation(1_000_000_000 * at // rate, read, facts_of(read))
                for detector in detectors:
                    detector.feed(states[rank], seen)
            if at % rate == 0:
                stragglers.report()
        best_s = min(best_s, time.process_time() - before)
    share = best_s / (steps / rate)
    return [
        (
            f"verdicts, {ranks} ranks at {rate} steps/s: share of a core",
            "<= 0.5 %",
            f"{share * 100:.2f} % ({best_s / steps / ranks * 1e6:.1f} us a step)",
        )
    ]


def exit_cost() -> list[Row]:
    states = ("healthy", "refusing", "silent", "unroutable")
    medians, worst = [], 0.0
    for state in states:
        with Receiver() as receiver, unroutable() as nowhere, Node() as node:
            endpoint = nowhere if state == "unroutable" else receiver.start_http()
            receiver.set_mode({"refusing": 503, "silent": "hang"}.get(state, "ok"))
            node.export_to(endpoint)
            took = [float(node.run(END)) for _ in range(5)]
        medians.append(f"{statistics.median(took):.0f}")
        worst = max(worst, *took)
    measured = f"{', '.join(medians)} ms (worst {worst:.0f})"
    return [(f"`finish()`, collector {', '.join(states)}", "<= 300 ms", measured)]


def sampling_cost(seconds: float = 20.0, ranks: int = 8) -> list[Row]:
    """What GPUs, host and processes cost beside what the agent does anyway, read alternately."""
    build = ROOT / "build" / "nvml"
    build.mkdir(parents=True, exist_ok=True)
    library = build / "libnvidia-ml.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
    boards = Boards(build)
    boards.write([h100(index) for index in range(8)])
    shares: dict[str, list[float]] = {"none": [], "gpu": [], "gpu,host,process": []}
    for _ in range(2):
        for sources, found in shares.items():
            with Node(**boards.environment(library), OTEL_DDP_SOURCES=sources) as node:
                for rank in range(ranks):
                    node.start(
                        *(sys.executable, "-c", RANK, "1", "1000", "5"),
                        env={
                            "OTEL_DDP_RANK": str(rank),
                            "OTEL_DDP_LOCAL_RANK": str(rank),
                            "OTEL_DDP_WORLD_SIZE": str(ranks),
                        },
                    )
                pid = int(node.agent()["pid"])
                until(lambda n=node: len(n.series("training_state")) == ranks, "all ranks")
                before, began = _cpu_s(pid), time.perf_counter()
                time.sleep(seconds)
                found.append((_cpu_s(pid) - before) / (time.perf_counter() - began))
    idle, gpu, both = (min(found) for found in shares.values())
    return [
        (
            f"sampling 8 GPUs (stand-in driver), host, {ranks} processes: share of a core",
            "<= 1 %",
            f"{(both - idle) * 100:.2f} % (GPUs {(gpu - idle) * 100:.2f} %)",
        )
    ]


# Ranks begin while others are measured already, and 72 take some seconds to start.
_START_S = 15.0


def agent_cost(rate: float, ranks: int = 8, values: int = 5, seconds: float = 20.0) -> list[Row]:
    with Receiver() as receiver, Node() as node:
        node.env["OTEL_METRIC_EXPORT_INTERVAL"] = "5000"
        sink = node.start(sys.executable, str(ROOT / "bench" / "sink.py"))
        assert sink.stdout is not None
        node.export_to(sink.stdout.readline().strip())
        processes = [
            node.start(
                *(sys.executable, "-c", RANK, str(rate), str(seconds + _START_S), str(values)),
                env={
                    "OTEL_DDP_RANK": str(rank),
                    "OTEL_DDP_LOCAL_RANK": str(rank),
                    "OTEL_DDP_WORLD_SIZE": str(ranks),
                },
            )
            for rank in range(ranks)
        ]
        pid = int(node.agent()["pid"])
        until(lambda: len(node.series("training_state")) == ranks, "all ranks")
        before, began = _cpu_s(pid), time.perf_counter()
        time.sleep(seconds)
        share = (_cpu_s(pid) - before) / (time.perf_counter() - began)
        memory = _rss_bytes(pid)
        url = node.agent()["scrape"]
        scrapes = [_scrape_s(url) for _ in range(20)]
        logged = sum(int(finished(process)) for process in processes)
        until(lambda: len(node.series("training_state")) == ranks, "all ranks")
        lost = sum(value for _, value in node.series("otel_ddp_records_lost_total"))
        node.stop_agent()
        assert sink.stdin is not None
        received = int(finished(sink))
        del receiver
    name = f"agent, {ranks} ranks at {rate:g} steps/s, {values} values a step"
    missing = logged * values - received
    if (ranks, values) != (8, 5):
        took_ms = statistics.median(scrapes) * 1000
        said = f"{share * 100:.1f} %, {memory / 1e6:.0f} MB, {took_ms:.0f} ms; {missing}"
        return [(f"{name}: share of a core, memory, scrape; values lost", "", said)]
    return [
        (
            f"{name}: share of a core",
            "<= 4 %" if rate <= 10 else "<= 25 %",
            f"{share * 100:.1f} %",
        ),
        (
            "the same: memory, scrape",
            "<= 120 MB, 30 ms",
            f"{memory / 1e6:.0f} MB, {statistics.median(scrapes) * 1000:.1f} ms",
        ),
        (
            "the same: values lost",
            "0",
            f"{missing} of {logged * values} ({lost:.0f} records overwritten)",
        ),
    ]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    return 0


def _scrape_s(url: str) -> float:
    before = time.perf_counter()
    with urllib.request.urlopen(url, timeout=10) as answer:
        answer.read()
    return time.perf_counter() - before


def machine() -> str:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return (
        f"{os.cpu_count()} cores of {model}, Linux, Python {platform.python_version()}, on which a "
        f"loop of ten million additions takes {min(_additions_s() for _ in range(3)):.2f} s"
    )


def _additions_s() -> float:
    """How fast the machine is just now: a shared one may be half as fast an hour later."""
    before = time.perf_counter()
    total = 0
    for number in range(10_000_000):
        total += number
    return time.perf_counter() - before


def main() -> None:
    parts = {
        "log": log_cost,
        "gauges": cost_beside_gauges,
        "import": import_cost,
        "start": start_cost,
        "agreement": agreement_cost,
        "hooks": hook_cost,
        "budget": budget_cost,
        "ratio": step_ratio,
        "memory": memory_growth,
        "exit": exit_cost,
        "agent": lambda: agent_cost(10.0),
        "agent-fast": lambda: agent_cost(100.0),
        "agent-ranks": lambda: [*agent_cost(10.0, ranks=16), *agent_cost(10.0, ranks=72)],
        "agent-values": lambda: agent_cost(1.0, values=1000),
        "sampling": sampling_cost,
        "verdicts": lambda: [*verdict_times(), *detector_cost()],
    }
    asked = [each for each in sys.argv[1:] if each != "--write"]
    if asked and "--write" in sys.argv:
        sys.exit("--write takes the place of the whole table, so it needs all parts: name none.")
    print(f"Measured on {machine()}.")
    tables: dict[int, list[str]] = {}
    head = 0
    for part in asked or parts:
        for row in parts[part]():
            lines = tables.setdefault(len(row), [])
            if len(row) != head:
                head = len(row)
                print("\n" + _head(head))
            lines.append(_line(row))
            print(lines[-1], flush=True)
    if "--write" in sys.argv:
        _write(tables)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _head(cells: int) -> str:
    return _line(HEADS[cells]) + "\n" + "|---" * cells + "|"


def _write(tables: dict[int, list[str]]) -> None:
    """Rows with a limit into the page of costs; into README.md those that it has, by their name."""
    page = ROOT / "docs" / "internals" / "performance.md"
    text = page.read_text()
    for cells, found in tables.items():
        # Those without a limit explain others to who runs the bench.
        lines = [line for line in found if cells != 3 or not line.split("|")[2].isspace()]
        before, mark, rest = text.partition(_head(cells) + "\n")
        text = "".join([before, mark, "\n".join(lines), rest[rest.index("\n\n") :]])
    page.write_text(text)
    by_name = {line.split("|")[1]: line for line in tables[3]}
    readme = ROOT / "README.md"
    rows = [
        by_name.get(line.split("|")[1], line) if line.startswith("| ") else line
        for line in readme.read_text().split("\n")
    ]
    readme.write_text("\n".join(rows))


if __name__ == "__main__":
    main()
