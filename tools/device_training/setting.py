"""What is trained, on what, and what is wrong with it."""

from __future__ import annotations

from typing import NamedTuple

from tools.device_training.rank import QUEUE

# What a trouble makes longer, by where it is.
DEVICE_SHARES = {
    "device": ("forward", "backward", "optimizer"),
    "forward kernels": ("forward",),
    "backward kernels": ("backward",),
    "optimizer kernels": ("optimizer",),
}
LAUNCH_SHARES = {
    "cores": ("forward", "backward", "optimizer"),
    "forward launches": ("forward",),
    "backward launches": ("backward",),
}


class Trouble(NamedTuple):
    """What one rank suffers from."""

    rank: int
    where: str
    """A key of DEVICE_SHARES or LAUNCH_SHARES; `batch`, `loader`, `host`, `copy`; `in forward`, of
    the host before each layer, or `before forward`, before the first one; or `item`."""
    amount: float
    """By which share of itself this grows; milliseconds a step for a loader, the host's own work,
    or a copy; for `item` it is in how many steps the rank synchronises once."""
    begins: int = 0
    """After this step."""


class Setting(NamedTuple):
    """A training in which all ranks are equal. Milliseconds are those of a micro-batch."""

    ranks: int = 2
    jitter: float = 0.0
    """Log-normal, of a device, a host, a loader in each step; half as much again of each part."""
    layers: int = 6
    kernels: int = 300
    """In a step without accumulation. The host is ahead by QUEUE / kernels steps at most."""
    launch_ms: float = 40.0
    """The host needs this to launch all of them."""
    host_ms: float = 2.0
    """What the host does between steps."""
    copy_ms: float = 1.0
    forward_ms: float = 27.0
    backward_ms: float = 54.0
    optimizer_ms: float = 9.0
    transfer_ms: float = 12.0
    """All transfers of a step together."""
    load_ms: float = 3.0
    prefetch: int = 0
    """How many batches a worker keeps ready; 0: the host loads them itself."""
    accumulation: int = 1
    item_every: int = 0
    """All ranks synchronise once in so many steps; 0: never."""
    disturbances: bool = False
    """Pauses, collections of garbage, checkpoints, batches of unequal length."""
    seed: int = 0

    def check(self) -> None:
        """Raise where the launch queue could not hold what is launched at once."""
        if max(map(self.kernels_of, ("forward", "backward", "optimizer"))) > QUEUE:
            raise ValueError(f"{self.kernels} kernels in {self.layers} layers are too many at once")

    def kernels_of(self, phase: str) -> int:
        """Of one layer, in forward and backward; of the whole optimizer."""
        forward, backward = (max(round(self.kernels * e / self.layers), 1) for e in (0.3, 0.5))
        # One more is the copy of the batch.
        optimizer = max(self.kernels - 1 - self.layers * (forward + backward), 1)
        return {"forward": forward, "backward": backward, "optimizer": optimizer}[phase]
