"""A trainer that builds its model by itself: nothing in this file knows of otel_ddp."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


def initialize_ddp(rank: int, world_size: int, master_addr: str, master_port: str) -> None:
    """Bring the processes together; what a launcher has set is left as it is."""
    os.environ.setdefault("MASTER_ADDR", master_addr)
    os.environ.setdefault("MASTER_PORT", master_port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup_ddp() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class TrainerDDP:
    """Trains on all ranks; validates, saves, and decides when to stop on rank 0."""

    def __init__(self, rank: int, config: Mapping[str, Any]) -> None:
        if "parallel" not in config:
            raise ValueError("config needs a section 'parallel' with the world size")
        self.rank, self.config = rank, config
        self.world_size = config["parallel"]["world_size"]
        self.stopped_after: int | None = None

    def prepare_dataloaders(self) -> tuple[DataLoader, DataLoader, DataLoader]:
        """Loaders of training (a share for each rank), validation and test."""
        training, validation, test = self.config["data"]()
        self.sampler: DistributedSampler[int] = DistributedSampler(
            training, self.world_size, self.rank
        )
        size = self.config["training"]["batch_size"]
        return (
            DataLoader(training, batch_size=size, sampler=self.sampler, drop_last=True),
            DataLoader(validation, batch_size=self.config["validation"]["batch_size"]),
            DataLoader(test, batch_size=self.config["testing"]["batch_size"]),
        )

    def run_training(self, training: DataLoader, validation: DataLoader) -> list[float]:
        """The validation losses, on rank 0."""
        settings = self.config["training"]
        torch.manual_seed(settings["seed"])
        self.model = DistributedDataParallel(
            self.config["model"](),
            find_unused_parameters=self.config["parallel"]["find_unused_parameters"],
        )
        optimizer = settings["optimizer_type"](
            self.model.parameters(), **settings["optimizer_kwargs"]
        )
        losses: list[float] = []
        for epoch in range(settings["num_epochs"]):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for batch in training:
                optimizer.zero_grad()
                self.config["criterion"](self.model, batch).backward()
                optimizer.step()
            stop = torch.zeros(1)
            if self.rank == 0:
                losses.append(self.evaluate("val", validation))
                if epoch % settings["checkpoint_at"] == 0:
                    path = Path(settings["path"]) / f"epoch_{epoch}.pt"
                    self.config["save"](self.model.module.state_dict(), path)
                since_best = epoch - losses.index(min(losses))
                stop += since_best >= self.config["early_stopping"]["patience"]
            # Rank 0 decides for all.
            dist.broadcast(stop, src=0)
            if stop:
                self.stopped_after = epoch
                break
        return losses

    def run_test(self, loader: DataLoader) -> float:
        """On rank 0, when training is over."""
        return self.evaluate("test", loader)

    @torch.no_grad()
    def evaluate(self, label: str, loader: DataLoader) -> float:
        """With the module inside of DDP: the other ranks take no part."""
        module = self.model.module
        module.eval()
        losses = [self.config["criterion"](module, batch).item() for batch in loader]
        self.config["report"](label, {"loss": sum(losses) / len(losses)})
        return sum(losses) / len(losses)
