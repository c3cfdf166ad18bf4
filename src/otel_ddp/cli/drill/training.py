"""Trains on one rank until it is told to end: the program that `otel-ddp drill` starts."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

# Up to this step all goes well, on all ranks; from then on not on rank 1.
TROUBLE_AT = 150
TROUBLED_RANK = 1
STEP_S = 0.02
LATE_S = 0.03
# The drill is over long before: no rank gives another one up that hangs.
_WAITS = timedelta(hours=1)


def is_over(folder: Path, parent: int) -> bool:
    """Whether the drill wants the end, or is gone itself."""
    return (folder / "end").exists() or os.getppid() != parent


def batches(play: str, rank: int, folder: Path) -> Iterator[torch.Tensor]:
    """Batches until the drill is over: the same number of them on all ranks."""
    parent, last_file = os.getppid(), folder / "last"
    generator = torch.Generator().manual_seed(rank)
    step = 0
    while not last_file.exists() or step <= int(last_file.read_text()):
        if rank == 0 and not last_file.exists() and is_over(folder, parent):
            # Before the gradients of this step are exchanged: so each rank knows it in the next.
            fresh = folder / "last.new"
            fresh.write_text(str(step + 1))
            fresh.rename(last_file)
        time.sleep(STEP_S)
        if step >= TROUBLE_AT and rank == TROUBLED_RANK:
            if play == "late":
                time.sleep(LATE_S)
            if play == "death":
                os.kill(os.getpid(), signal.SIGKILL)
            while play == "hang" and not is_over(folder, parent):
                time.sleep(0.1)
        yield torch.randn(8, 16, generator=generator)
        step += 1


def main(play: str, folder: Path) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=world_size, timeout=_WAITS
    )
    model = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    run = otel_ddp.instrument(model, config={"drill": play})

    for step, batch in enumerate(otel_ddp.data(batches(play, rank, folder))):
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log({"loss": loss}, step=step)
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
