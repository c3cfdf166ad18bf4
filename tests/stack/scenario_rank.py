"""One rank of the scenario, real DDP on gloo, with troubles: scenario_rank.py FOLDER PART.

PART is a `Part` in JSON. A file `TROUBLE-RANK` in FOLDER is what befalls that rank from then on.
What only a GPU has to tell (its memory as torch sees it, its best) each rank writes down as the
hooks would.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

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


class Part(NamedTuple):
    """One rank's part of a run."""

    config: dict[str, float]
    gpu: str
    """The UUID of its board; empty where it has none."""
    times_data: bool
    """Whether its loader is wrapped, as its own is none of torch's."""


class Troubles:
    """What befalls this rank, and under which step all ranks of its run end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rank = folder, int(os.environ["RANK"])

    def hits(self, trouble: str) -> bool:
        return (self.folder / f"{trouble}-{self.rank}").exists()

    def goes_on(self, step: int) -> bool:
        """Whether there is such a step; all ranks hear of the last one in time for it."""
        last = self.folder / "last"
        # Rank 0 decides before it exchanges gradients, without which nobody begins another step.
        if self.hits("end") and not last.exists():
            last.with_suffix(".new").write_text(str(step + 1))
            last.with_suffix(".new").rename(last)
        return not last.exists() or step <= int(last.read_text())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.words(input_ids))


def batches(first: int, troubles: Troubles) -> Iterator[tuple[int, torch.Tensor]]:
    generator = torch.Generator().manual_seed(troubles.rank)
    step = first
    while troubles.goes_on(step):
        time.sleep(DATA_S + (LATE_S if troubles.hits("late") else 0.0))
        if troubles.hits("hang"):
            signal.pause()
        yield step, torch.randint(WORDS, (BATCH, LENGTH + 1), generator=generator)
        step += 1


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def main(folder: Path, part: Part) -> None:
    """Until the end, or until something befalls this rank or another one."""
    troubles = Troubles(folder)
    rank, world = troubles.rank, int(os.environ["WORLD_SIZE"])
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    store = f"file://{folder}/store-{restarts}"
    dist.init_process_group("gloo", store, rank=rank, world_size=world)
    saved = folder / "model.pt"
    first = torch.load(saved)["step"] + 1 if saved.exists() else 1
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=part.config["lr"], momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    run = otel_ddp.instrument(model, config=part.config, scaler=scaler)
    if saved.exists() and rank == 0:
        run.artifact(saved, name="checkpoint", type="model", direction="input")
    loader = batches(first, troubles)
    for step, batch in otel_ddp.data(loader) if part.times_data else loader:
        loss = loss_of(model, batch)
        if troubles.hits("nan") and step % NAN_EVERY == 0:
            loss = loss * math.nan
        scaler.scale(loss).backward()
        befall(troubles, step)
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


def befall(troubles: Troubles, step: int) -> None:
    """What is to happen to this rank in this step, if anything is."""
    if troubles.hits("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    # Some way behind a checkpoint, so that there are steps to do again.
    if troubles.hits("fail") and step % SAVE_EVERY == SAVE_EVERY // 2:
        log.error("no memory is left to rank %d", troubles.rank)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    if troubles.hits("burst") and step % BURST_EVERY == 0:
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), Part(**json.loads(sys.argv[2])))
