"""Pictures of ten kinds, a small convolutional network, and all settings in one dictionary.

Training, a validation after each epoch and a test at the end, on every process of a PyTorch job
(RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set). CPU, gloo.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

KINDS, SIDE = 10, 12


class Net(nn.Module):
    def __init__(self, hparams: dict[str, float]) -> None:
        super().__init__()
        channels, kernel = hparams["conv_channels"], hparams["conv_kernel_size"]
        self.conv = nn.Conv2d(1, channels, kernel)
        self.pool = nn.MaxPool2d(hparams["pool_size"])
        side = (SIDE - kernel + 1) // hparams["pool_size"]
        self.hidden = nn.Linear(channels * side * side, hparams["linear_features"])
        self.out = nn.Linear(hparams["linear_features"], KINDS)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        found = self.pool(F.relu(self.conv(pictures)))
        return self.out(F.relu(self.hidden(found.flatten(1))))


def pictures(count: int, seed: int) -> TensorDataset:
    originals = torch.randn(KINDS, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    kinds = torch.randint(KINDS, (count,), generator=generator)
    noise = torch.randn(count, 1, SIDE, SIDE, generator=generator)
    return TensorDataset(originals[kinds] + 1.5 * noise, kinds)


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    hparams = {
        "batch_size": 32,
        "epochs": 3,
        "learning_rate": 0.001 * world_size,
        "learning_rate_decay": 0.7,
        "conv_channels": 8,
        "conv_kernel_size": 3,
        "pool_size": 2,
        "linear_features": 32,
        "log_every": 20 // world_size,
        "seed": 1,
    }

    torch.manual_seed(hparams["seed"])
    model = DistributedDataParallel(Net(hparams))
    optimizer = torch.optim.Adam(model.parameters(), lr=hparams["learning_rate"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, hparams["learning_rate_decay"])
    train_data, batch_size = pictures(2048, seed=1), hparams["batch_size"]
    sampler: DistributedSampler[int] = DistributedSampler(train_data)
    train_loader = DataLoader(train_data, batch_size=batch_size, sampler=sampler)
    val_loader = DataLoader(pictures(256, seed=2), batch_size=batch_size)
    test_loader = DataLoader(pictures(256, seed=3), batch_size=batch_size)
    global_step = 0

    def say(text: str) -> None:
        if rank == 0:
            print(text)

    def test(label: str, loader: DataLoader, epoch: int) -> None:
        model.eval()
        total, correct = 0.0, 0
        with torch.no_grad():
            for data, kinds in loader:
                scores = model(data)
                total += F.cross_entropy(scores, kinds).item()
                correct += int((scores.argmax(dim=1) == kinds).sum())
        metrics = {"loss": total / len(loader), "accuracy": correct / len(loader.dataset)}
        say(f"epoch {epoch}, {label}: {metrics}")

    for epoch in range(1, hparams["epochs"] + 1):
        sampler.set_epoch(epoch)
        model.train()
        for step, (data, kinds) in enumerate(train_loader, start=1):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(data), kinds)
            loss.backward()
            optimizer.step()
            global_step = (epoch - 1) * len(train_loader) + step
            if step % hparams["log_every"] == 0:
                say(f"step {global_step}: loss {loss.item()}")
        scheduler.step()
        test("val", val_loader, epoch)
    test("test", test_loader, epoch)

    if rank == 0:
        path = Path(os.environ.get("OUTPUT", ".")) / "model_state_dict.pt"
        torch.save(model.module.state_dict(), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
