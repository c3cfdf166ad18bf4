"""torch.multiprocessing.spawn: the children are one run, with no id passed around.

python examples/spawn.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import otel_ddp


def worker(rank: int, world_size: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=world_size)
    run = otel_ddp.init("main", group="examples", job_type="main" if rank == 0 else "worker")
    for step in range(20):
        total = torch.full((1,), float(rank + step))
        dist.all_reduce(total)
        run.log({"total": total}, step=step)
    print(f"rank {rank} is part of run {run.run}", flush=True)
    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'rendezvous'}"
        mp.spawn(worker, args=(2, rendezvous), nprocs=2)
