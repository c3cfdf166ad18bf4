"""A GAN: two DDP models, an optimizer each, and one training step that holds updates of both.

torchrun --standalone --nproc-per-node 2 examples/gan.py
"""

import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import otel_ddp


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(inputs, 64), nn.LeakyReLU(0.2)),
        *(nn.Linear(64, 64), nn.LeakyReLU(0.2)),
        nn.Linear(64, outputs),
    )


def circle(size: int, device: torch.device) -> torch.Tensor:
    angle = 2 * math.pi * torch.rand(size, device=device)
    return torch.stack([angle.cos(), angle.sin()], dim=1)


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    # DDP starts all ranks from the weights of rank 0; only the noise differs.
    torch.manual_seed(dist.get_rank())

    config = {"lr": 1e-3, "batch_size": 128, "noise": 8, "steps": 100, "critic_updates": 2}
    batch_size, noise = config["batch_size"], config["noise"]
    generator = DistributedDataParallel(network(noise, 2).to(device))
    critic = DistributedDataParallel(network(2, 1).to(device))
    generator_optimizer = torch.optim.Adam(generator.parameters(), config["lr"], betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), config["lr"], betas=(0.5, 0.9))

    run = otel_ddp.instrument(generator, strategy="all", group="examples", config=config)
    # The critic is updated several times a step; the generator's update ends the step.
    otel_ddp.instrument(critic, step_optimizer=generator_optimizer)

    for step in range(config["steps"]):
        for _ in range(config["critic_updates"]):
            with torch.no_grad():
                fake = generator(torch.randn(batch_size, noise, device=device))
            real = circle(batch_size, device)
            real_score, fake_score = critic(torch.cat([real, fake])).chunk(2)
            critic_loss = (F.relu(1 - real_score) + F.relu(1 + fake_score)).mean()
            critic_optimizer.zero_grad()
            critic_loss.backward()
            critic_optimizer.step()

        # The critic's gradients of this pass are not used, so they need not be exchanged.
        with critic.no_sync():
            fake = generator(torch.randn(batch_size, noise, device=device))
            generator_loss = -critic(fake).mean()
            generator_optimizer.zero_grad()
            generator_loss.backward()
        generator_optimizer.step()

        distance = (fake.detach().norm(dim=1) - 1).abs().mean()
        run.log(
            {"critic_loss": critic_loss, "generator_loss": generator_loss, "distance": distance},
            step=step,
        )

    run.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
