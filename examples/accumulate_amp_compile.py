"""DDP with gradient accumulation, mixed precision and torch.compile.

torchrun --standalone --nproc-per-node 2 examples/accumulate_amp_compile.py
"""

import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import otel_ddp


def dataset(size: int) -> TensorDataset:
    inputs = torch.randn(size, 32)
    return TensorDataset(inputs, (inputs @ torch.randn(32, 4)).argmax(dim=1))


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)

    config = {"lr": 3e-3, "batch_size": 32, "accumulate": 4, "epochs": 3}
    accumulate = config["accumulate"]
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 4))
    model = DistributedDataParallel(model.to(device))
    # The default backend needs a C++ compiler where there is no GPU; this one needs none.
    model = torch.compile(model, backend="inductor" if device.type == "cuda" else "aot_eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr"])
    scaler = torch.amp.GradScaler(device.type)

    # The last line before the loop, once the model is the one that the loop calls.
    run = otel_ddp.instrument(model, strategy="all", scaler=scaler, group="examples", config=config)

    training = dataset(8192)
    sampler: DistributedSampler[int] = DistributedSampler(training)
    loader = DataLoader(training, batch_size=config["batch_size"], sampler=sampler)
    loss_of = nn.CrossEntropyLoss()
    step = 0
    for epoch in range(config["epochs"]):
        sampler.set_epoch(epoch)
        total = torch.zeros((), device=device)
        for number, (inputs, labels) in enumerate(loader, start=1):
            last = number % accumulate == 0 or number == len(loader)
            # The ranks exchange gradients once a step, in its last micro-batch.
            with contextlib.nullcontext() if last else model.no_sync():
                with torch.autocast(device.type, dtype=torch.float16):
                    outputs = model(inputs.to(device))
                    loss = loss_of(outputs, labels.to(device)) / accumulate
                scaler.scale(loss).backward()
            total += loss.detach()
            if last:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                run.log({"loss": total}, step=step, epoch=epoch)
                total = torch.zeros((), device=device)
                step += 1

    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
