"""Trains two ranks with troubles that are known, and writes down what it did: FOLDER ATTEMPT.

Rank 1 is late in data from step 100 to 219, rank 0 saves and both evaluate after every 100 steps,
and rank 1 is killed in step 380. The second launch goes on from step 320; the loss of rank 0 is NaN
there from step 430 on. FOLDER gets one file of each rank and attempt: of each step its number, when
it began and ended, and the seconds of each trouble in it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp
from training import WIDTH, Block

STEPS, RESUMES_AT, KILLED_AT, NAN_FROM = 450, 320, 380, 430
LATE, LATE_S = range(100, 220), 0.04
EVAL_S, CHECKPOINT_S = 0.1, 0.3


def loss_at(step: int) -> float:
    """Lowest at step 360."""
    return 0.5 + abs(step - 360) / 1000


def main(folder: Path, attempt: int) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Sequential(Block(work_s=0.008), nn.Linear(WIDTH, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    began_s = time.time()
    run = otel_ddp.instrument(model, group="g", run="known", config={"lr": 0.01})
    seconds: dict[str, float] = {}

    def spend(trouble: str, least_s: float) -> None:
        began_s = time.monotonic()
        time.sleep(least_s)
        seconds[trouble] = time.monotonic() - began_s

    def batches() -> Iterator[torch.Tensor]:
        for step in range(RESUMES_AT if attempt else 0, STEPS):
            if rank == 1 and step in LATE:
                spend("late", LATE_S)
            yield torch.ones(4, WIDTH)

    with (folder / f"{rank}-{attempt}").open("w", buffering=1) as file:
        for step, batch in enumerate(otel_ddp.data(batches()), RESUMES_AT if attempt else 0):
            model(batch).square().mean().backward()
            if (attempt, rank, step) == (0, 1, KILLED_AT):
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            is_nan = rank == 0 and step >= NAN_FROM
            run.log({"loss": math.nan if is_nan else loss_at(step)}, step=step)
            if step % 100 == 99:
                with run.phase("eval"):
                    spend("eval", EVAL_S)
                run.log({"accuracy": step / 1000}, step=step, split="validation")
                if rank == 0:
                    with run.phase("checkpoint"):
                        spend("checkpoint", CHECKPOINT_S)
            ended_s = time.time()
            file.write(json.dumps([step, began_s, ended_s, seconds]) + "\n")
            began_s = ended_s
            seconds.clear()
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
