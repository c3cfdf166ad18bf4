"""Processes of several roles in one experiment, started by mp.spawn or by torchrun. CPU, gloo.

Started with python, this program makes two processes. Under torchrun it is one of several, each
node says which it is, and EXP_ID names the experiment.
"""

import os
import uuid

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

EPOCHS, STEPS, LEARNING_RATE = 10, 20, 0.05


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(size, 16)
    return inputs, (inputs.sum(dim=1, keepdim=True) > 0).float()


def train(rank: int, world_size: int, experiment: str) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loss_of = nn.BCEWithLogitsLoss()

    for epoch in range(EPOCHS):
        for _ in range(STEPS):
            inputs, labels = batch(64)
            outputs = model(inputs)
            loss = loss_of(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        accuracy = ((outputs > 0) == (labels > 0)).float().mean()
        if rank == 0:
            print(f"{experiment}: epoch {epoch}, loss {loss.item()}, accuracy {accuracy.item()}")

    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        experiment = f"distributed_exp_{os.environ.get('EXP_ID', '001')}"
        train(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), experiment)
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "12355")
    experiment = f"exp_{uuid.uuid4().hex[:8]}"
    mp.spawn(train, args=(2, experiment), nprocs=2)


if __name__ == "__main__":
    main()
