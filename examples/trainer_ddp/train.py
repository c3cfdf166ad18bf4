"""What a user of TrainerDDP writes: a model, a criterion, a configuration. CPU, gloo.

Started with python, this program makes its processes by mp.spawn. Under torchrun or
torch.distributed.launch it is one of theirs.
"""

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn
from torch.utils.data import TensorDataset
from trainer import TrainerDDP, cleanup_ddp, initialize_ddp

import otel_ddp


def data() -> list[TensorDataset]:
    """For training, validation and test."""
    generator = torch.Generator().manual_seed(0)
    sets = []
    for size in (2048, 512, 512):
        inputs = torch.randn(size, 12, generator=generator)
        noise = torch.randn(size, 1, generator=generator)
        sets.append(
            TensorDataset(inputs, inputs[:, :4].sum(dim=1, keepdim=True).tanh() + noise / 4)
        )
    return sets


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 1))


def compute_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    inputs, targets = batch
    loss = nn.functional.mse_loss(model(inputs), targets)
    assert loss.isfinite(), "the loss is no number"
    if model.training:
        otel_ddp.log({"loss": loss})
    return loss


def report(label: str, metrics: dict[str, float]) -> None:
    logging.info("%s: %s", label, metrics)
    otel_ddp.log(metrics, split=label)


def save(state: dict[str, torch.Tensor], path: Path) -> None:
    with otel_ddp.phase("checkpoint"):
        torch.save(state, path)


CONFIG: dict[str, Any] = {
    "data": data,
    "model": model,
    "criterion": compute_loss,
    "report": report,
    "save": save,
    "parallel": {
        "world_size": 2,
        "rank": None,
        "master_addr": "127.0.0.1",
        "master_port": "12355",
        "find_unused_parameters": False,
    },
    "training": {
        "seed": 42,
        "num_epochs": 16,
        "batch_size": 64,
        "optimizer_type": torch.optim.AdamW,
        "optimizer_kwargs": {"lr": 0.03, "weight_decay": 0.00005},
        "checkpoint_at": 4,
    },
    "validation": {"batch_size": 512},
    "testing": {"batch_size": 512},
    "early_stopping": {"patience": 3},
}


def train_ddp(rank: int, world_size: int, config: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(message)s")
    parallel = config["parallel"]
    parallel["world_size"] = world_size
    try:
        initialize_ddp(rank, world_size, parallel["master_addr"], parallel["master_port"])
        otel_ddp.instrument(group="trainer", config=config)
        trainer = TrainerDDP(rank, config)
        train_loader, val_loader, test_loader = trainer.prepare_dataloaders()
        logging.info("%d samples to train with", len(train_loader.dataset))
        trainer.run_training(train_loader, val_loader)
        if trainer.stopped_after is not None:
            logging.info("stopped after epoch %d", trainer.stopped_after)
            otel_ddp.event("early_stop", epoch=trainer.stopped_after)
        if rank == 0:
            trainer.run_test(test_loader)
    finally:
        cleanup_ddp()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        CONFIG["training"]["path"] = folder
        if "RANK" in os.environ:
            train_ddp(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), CONFIG)
            return
        world_size = CONFIG["parallel"]["world_size"]
        mp.spawn(train_ddp, args=(world_size, CONFIG), nprocs=world_size)


if __name__ == "__main__":
    main()
