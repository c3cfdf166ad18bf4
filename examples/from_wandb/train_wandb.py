"""The same program as it was written for W&B: rank 0 logs. CPU, gloo.

`WANDB_MODE=offline otel-ddp run -- torchrun ... train_wandb.py`: what it tells W&B comes here too.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import wandb
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 4


def dataset(size: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    centers = torch.randn(CLASSES, 16, generator=generator)
    return TensorDataset(centers[labels] + torch.randn(size, 16, generator=generator), labels)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.02)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()
    data = dataset(2048)
    sampler: DistributedSampler[int] = DistributedSampler(data)
    loader = DataLoader(data, batch_size=args.batch_size, sampler=sampler)
    if dist.get_rank() == 0:
        wandb.init(
            project="classifier",
            entity="team",
            group="my-experiment",
            name="baseline",
            config=vars(args),
            settings=wandb.Settings(console="off"),
        )
        wandb.config.update({"classes": CLASSES})
        wandb.define_metric("accuracy", summary="max")
        wandb.watch(model)

    best = 0.0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            outputs = model(inputs)
            loss = loss_of(outputs, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            accuracy = (outputs.argmax(dim=1) == labels).float().mean()
            if wandb.run is not None:
                wandb.log({"loss": loss.item(), "accuracy": accuracy.item(), "epoch": epoch})
            best = max(best, accuracy.item())

    dist.barrier()
    if dist.get_rank() == 0:
        state = {"model": network.state_dict(), "optimizer": optimizer.state_dict()}
        path = Path(os.environ.get("OUTPUT", ".")) / "model.pt"
        torch.save(state, path)
        artifact = wandb.Artifact("model", type="model", metadata={"loss": loss.item()})
        artifact.add_file(str(path))
        wandb.log_artifact(artifact)
        wandb.log({"predictions": wandb.Table(columns=["label"], data=[[1], [2]])}, commit=False)
        wandb.run.summary["best_accuracy"] = best
        wandb.finish()
        print(f"loss {loss.item()}, accuracy {accuracy.item()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
