"""DistributedDataParallel under torchrun: one line more than without otel_ddp.

torchrun --standalone --nproc-per-node 2 examples/ddp.py
"""

import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import otel_ddp


def dataset(size: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 32, generator=generator)
    return TensorDataset(inputs, (inputs.sum(dim=1) > 0).long())


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    model = DistributedDataParallel(net)
    config = {"lr": 0.1, "batch_size": 64, "epochs": 3}

    run = otel_ddp.instrument(model, strategy="all", group="examples", config=config)

    training, validation = dataset(4096, seed=1), dataset(1024, seed=2)
    sampler: DistributedSampler[int] = DistributedSampler(training)
    loader = DataLoader(training, batch_size=config["batch_size"], sampler=sampler)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    loss_of = nn.CrossEntropyLoss()
    step = 0
    for epoch in range(config["epochs"]):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            inputs, labels = inputs.to(device), labels.to(device)
            optimizer.zero_grad()
            loss = loss_of(model(inputs), labels)
            loss.backward()
            optimizer.step()
            # The loss may stay a tensor: otel_ddp never waits for it.
            run.log({"loss": loss, "lr": config["lr"]}, step=step, epoch=epoch)
            step += 1

        with run.phase("eval"), torch.no_grad():
            inputs, labels = (each.to(device) for each in validation.tensors)
            accuracy = (model.module(inputs).argmax(dim=1) == labels).float().mean()
        run.log({"accuracy": accuracy}, step=step, epoch=epoch, split="val")

        if dist.get_rank() == 0:
            with run.phase("checkpoint"), tempfile.TemporaryDirectory() as folder:
                torch.save(model.module.state_dict(), Path(folder) / "model.pt")

    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
