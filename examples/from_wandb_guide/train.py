"""A regression whose launcher says --local_rank, as python -m torch.distributed.launch does.

It trains on a GPU for each process where there are any, else on the CPU.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp

EPOCHS, STEPS = 4, 20


def train(args: argparse.Namespace) -> None:
    device = f"cuda:{args.local_rank}" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1 + dist.get_rank())
    network = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)).to(device)
    model = DistributedDataParallel(network)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    run = otel_ddp.instrument(model, strategy=args.track, project=args.project, group="DDP")

    for epoch in range(EPOCHS):
        for _ in range(STEPS):
            inputs = torch.randn(64, 8, device=device)
            loss = (model(inputs) - inputs.sin().sum(dim=1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.log({"loss": loss, "epoch": epoch})
        if args.local_rank == 0:
            print(f"epoch {epoch}: loss {loss.item()}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    # torch has spelt it both ways.
    parser.add_argument("--local_rank", "--local-rank", type=int, required=True)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--project", default="guide")
    parser.add_argument("--track", choices=("main", "all"), default="all")
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    train(parser.parse_args())
    dist.destroy_process_group()
