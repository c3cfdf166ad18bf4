"""Starts the ranks of the scenario on demand, and is each of them: real DDP on gloo, with troubles.

Every rank is a process of its own and a real training, forked from one that has imported torch: so
that a dozen of them cost seconds and not a minute. What only a GPU has to tell (its memory as
torch sees it, its best) each rank writes down as the hooks would. Orders come by standard input,
a line each; when that ends, so do all ranks.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from ctypes import Array, c_int64
from importlib import import_module
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp
from otel_ddp import errors
from otel_ddp.vocabulary import catalog

log = logging.getLogger("train")

GIB = 1 << 30
WORDS, LENGTH, BATCH = 64, 16, 4
DATA_S, LATE_S = 0.05, 0.05
EVAL_EVERY, SAVE_EVERY, NAN_EVERY, BURST_EVERY, EPOCH = 25, 20, 15, 12, 100
# More than the ring of a small journal holds.
BURST = 3000

# What may befall a rank; `end` befalls all of them.
TROUBLES = ("late", "hang", "kill", "fail", "nan", "burst", "end")
NOBODY, NO_STEP = -1, -1


class Orders:
    """What the ranks of one run have been told, and under which step the last of them ends."""

    def __init__(self) -> None:
        self._told: Array[c_int64] = RawArray(c_int64, [NOBODY] * len(TROUBLES) + [NO_STEP])

    def tell(self, trouble: str, rank: int) -> None:
        self._told[TROUBLES.index(trouble)] = rank

    def hits(self, trouble: str, rank: int) -> bool:
        return bool(self._told[TROUBLES.index(trouble)] == rank)

    def goes_on(self, step: int, rank: int) -> bool:
        """Whether there is such a step; all ranks hear of the last one in time for it."""
        # Rank 0 decides before it exchanges gradients, without which nobody begins another step.
        if self.hits("end", rank) and self._told[-1] == NO_STEP:
            self._told[-1] = step + 1
        return bool(self._told[-1] == NO_STEP or step <= self._told[-1])


class Part(NamedTuple):
    """One rank's part of a run, as the order to start it has it."""

    folder: str
    config: dict[str, float]
    env: dict[str, str]
    gpu: str
    """The UUID of its board; empty where it has none."""
    times_data: bool
    """Whether its loader is wrapped, as its own is none of torch's."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(input_ids))


def batches(first: int, rank: int, orders: Orders) -> Iterator[tuple[int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    step = first
    while orders.goes_on(step, rank):
        time.sleep(DATA_S + (LATE_S if orders.hits("late", rank) else 0.0))
        if orders.hits("hang", rank):
            signal.pause()
        yield step, torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
        step += 1


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(part: Part, orders: Orders) -> None:
    """Until the end, or until something befalls this rank or another one."""
    os.environ.clear()
    os.environ.update(part.env)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = f"file://{part.folder}/store-{restarts}"
    dist.init_process_group("gloo", store, rank=rank, world_size=world)
    saved = Path(part.folder) / "model.pt"
    first = torch.load(saved)["step"] + 1 if saved.exists() else 1
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=part.config["lr"], momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    run = otel_ddp.instrument(model, config=part.config, scaler=scaler)
    if saved.exists() and rank == 0:
        run.artifact(saved, name="checkpoint", type="model", direction="input")
    loader = batches(first, rank, orders)
    for step, batch in otel_ddp.data(loader) if part.times_data else loader:
        loss = loss_of(model, batch)
        if orders.hits("nan", rank) and step % NAN_EVERY == 0:
            loss = loss * math.nan
        scaler.scale(loss).backward()
        befall(part, orders, rank, step)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = part.config["lr"] * 0.999**step
        run.log(
            {"loss": loss.item(), "lr": optimizer.param_groups[0]["lr"]},
            step=step,
            epoch=step / EPOCH,
        )
        if part.gpu:
            tell_of_gpu(run, part.gpu, step)
        if step % EVAL_EVERY == 0:
            evaluate(run, model, step)
        if step % SAVE_EVERY == 0 and rank == 0:
            save(run, model, step, saved)
    run.finish()
    dist.destroy_process_group()


def befall(part: Part, orders: Orders, rank: int, step: int) -> None:
    """What is to happen to this rank in this step, if anything is."""
    if orders.hits("kill", rank):
        os.kill(os.getpid(), signal.SIGKILL)
    # Some way behind a checkpoint, so that there are steps to do again.
    if orders.hits("fail", rank) and step % SAVE_EVERY == SAVE_EVERY // 2:
        log.error("no memory is left to rank %d", rank)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if orders.hits("burst", rank) and step % BURST_EVERY == 0:
        for number in range(BURST):
            otel_ddp.event("sample", number=number)
        otel_ddp.log({"note": "no number"}, step=step)
        # As one of our hooks that failed.
        errors.count_failure()


def evaluate(run: otel_ddp.Run, model: DistributedDataParallel, step: int) -> None:
    model.eval()
    with run.phase("eval"), torch.no_grad():
        batch = torch.randint(WORDS, (BATCH, LENGTH + 1))
        loss = loss_of(model.module, batch)
        time.sleep(0.02)
    model.train()
    run.log({"loss": loss.item(), "accuracy": 1.0 - 1.0 / step}, step=step, split="val")


def save(run: otel_ddp.Run, model: DistributedDataParallel, step: int, saved: Path) -> None:
    with run.phase("checkpoint"):
        fresh = saved.with_suffix(".new")
        torch.save({"step": step, "model": model.module.state_dict()}, fresh)
        fresh.replace(saved)
    run.artifact(saved, name="checkpoint", type="model")


def tell_of_gpu(run: otel_ddp.Run, uuid: str, step: int) -> None:
    """What the hooks read where the model lies on a GPU."""
    recorder = run._records.recorder
    assert recorder is not None
    recorder.documents.facts({"boards": [{"index": 0, "uuid": uuid}]})
    used = (40 + step % 10) * GIB
    recorder.totals.stamp(catalog.TRAINING_DEVICE_MEMORY_ALLOCATED, float(used))
    recorder.totals.stamp(catalog.TRAINING_DEVICE_MEMORY_RESERVED, float(used + 8 * GIB))
    recorder.totals.stamp(catalog.TRAINING_DEVICE_MEMORY_PEAK, float(50 * GIB))
    recorder.totals.stamp(catalog.TRAINING_DEVICE_MEMORY_LIMIT, float(80 * GIB))
    recorder.totals.stamp(catalog.TRAINING_DEVICE_MEMORY_ALLOC_RETRIES, float(step // 20))
    recorder.totals.stamp(catalog.TRAINING_OOMS, 0.0)
    recorder.totals.stamp(
        catalog.TRAINING_FLOPS_PEAK, 67e12, dtype="float32", device="NVIDIA H100 80GB HBM3"
    )


def import_all() -> None:
    """What a training imports lazily; nothing that would start a thread before the fork."""
    for name in ("otel_ddp.run", "otel_ddp.torch.measure"):
        import_module(name)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    import_all()
    context = multiprocessing.get_context("fork")
    # Unbuffered: what was read and not yet looked at would wake nobody.
    with open(0, "rb", buffering=0) as told:
        runs: dict[str, Orders] = {}
        ranks: list[BaseProcess] = []
        while True:
            awake = wait([told, *(each.sentinel for each in ranks)])
            # Asked whether they live, those that do not are buried.
            ranks = [each for each in ranks if each.is_alive()]
            if told not in awake:
                continue
            line = told.readline()
            if not line:
                break
            order: dict[str, Any] = json.loads(line)
            if order["do"] == "start":
                orders = runs[order["run"]] = Orders()
                for said in order["ranks"]:
                    part = Part(**order["part"], **said)
                    ranks.append(context.Process(target=train, args=(part, orders)))
                    ranks[-1].start()
            else:
                runs[order["run"]].tell(order["do"], order["rank"])
    for each in ranks:
        each.kill()
        each.join()


if __name__ == "__main__":
    main()
    sys.exit(0)
