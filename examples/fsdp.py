"""FSDP2: a small language model whose blocks are sharded over the ranks. PyTorch 2.6 or newer.

torchrun --standalone --nproc-per-node 2 examples/fsdp.py
"""

import os
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, random_split

import otel_ddp


class Output(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        mixed = self.query_key_value(self.attention_norm(hidden))
        query, key, value = mixed.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(hidden)


class LanguageModel(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary))

    def forward(self, input_ids: torch.Tensor) -> Output:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        logits = self.head(self.blocks(self.tokens(input_ids) + self.positions(positions)))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        return Output(loss, logits)


def sequences(vocabulary: int, length: int) -> torch.Tensor:
    """Counting up from every start by strides of 0 to 15, modulo the vocabulary."""
    starts, strides = torch.arange(vocabulary), torch.arange(16)
    start, stride = torch.cartesian_prod(starts, strides).split(1, dim=1)
    return (start + stride * torch.arange(length)) % vocabulary


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)

    shape = {"vocabulary": 64, "length": 32, "width": 64, "heads": 4, "depth": 2}
    config = {"lr": 1e-2, "batch_size": 32, "epochs": 2, "clip": 1.0, "model": shape}
    model = LanguageModel(**shape).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    # The model returns its loss as `.loss`, so the loss is recorded without being logged.
    run = otel_ddp.instrument(model, strategy="all", group="examples", config=config)

    training, validation = random_split(sequences(shape["vocabulary"], shape["length"]), [0.9, 0.1])
    sampler: DistributedSampler[int] = DistributedSampler(training)
    loader = DataLoader(training, batch_size=config["batch_size"], sampler=sampler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=config["lr"], epochs=config["epochs"], steps_per_epoch=len(loader)
    )
    step = 0
    for epoch in range(config["epochs"]):
        sampler.set_epoch(epoch)
        model.train()
        for input_ids in loader:
            optimizer.zero_grad()
            model(input_ids=input_ids.to(device)).loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), config["clip"])
            optimizer.step()
            # Each rank holds a part of the norm; the whole norm is logged.
            values = {"grad_norm": norm.full_tensor(), "lr": schedule.get_last_lr()[0]}
            run.log(values, step=step, epoch=epoch)
            schedule.step()
            step += 1

        model.eval()
        with torch.no_grad():
            losses = [
                model(input_ids=input_ids.to(device)).loss
                for input_ids in DataLoader(validation, batch_size=32)
            ]
        perplexity = torch.stack(losses).mean().exp()
        run.log({"perplexity": perplexity}, step=step, epoch=epoch, split="val")

        # All ranks gather the weights, one writes them.
        with run.phase("checkpoint"), tempfile.TemporaryDirectory() as folder:
            whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
            weights = get_model_state_dict(model, options=whole)
            if dist.get_rank() == 0:
                torch.save(weights, Path(folder) / "model.pt")

    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
