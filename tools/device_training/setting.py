"""The parameters of a simulated training, and its faults."""

from __future__ import annotations

from typing import NamedTuple

from tools.device_training.rank import QUEUE

# The parts that a fault makes longer, by its place.
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
    """A fault of one rank."""

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
    """A training with equal ranks. Milliseconds are per micro-batch."""

    ranks: int = 2
    jitter: float = 0.0
    """Log-normal, of a device, a host, a loader in each step; half as much again of each part."""
    layers: int = 6
    kernels: int = 300
    """In a step without accumulation. The host is ahead by QUEUE / kernels steps at most."""
    launch_ms: float = 40.0
    """The host's time to launch all of them."""
    host_ms: float = 2.0
    """The host's work between steps."""
    copy_ms: float = 1.0
    forward_ms: float = 27.0
    backward_ms: float = 54.0
    optimizer_ms: float = 9.0
    transfer_ms: float = 12.0
    """All transfers of a step together."""
    load_ms: float = 3.0
    prefetch: int = 0
    """How many batches a worker keeps ready; 0: the host loads them."""
    accumulation: int = 1
    item_every: int = 0
    """All ranks synchronise once in this many steps; 0: never."""
    disturbances: bool = False
    """Pauses, garbage collections, checkpoints, batches of unequal length."""
    seed: int = 0

    def check(self) -> None:
        """Raise if the launch queue cannot hold a burst of launches."""
        if max(map(self.kernels_of, ("forward", "backward", "optimizer"))) > QUEUE:
            raise ValueError(f"{self.kernels} kernels in {self.layers} layers are too many at once")

    def kernels_of(self, phase: str) -> int:
        """Of one layer, in forward and backward; of the whole optimizer."""
        forward, backward = (max(round(self.kernels * e / self.layers), 1) for e in (0.3, 0.5))
        # One more is the copy of the batch.
        optimizer = max(self.kernels - 1 - self.layers * (forward + backward), 1)
        return {"forward": forward, "backward": backward, "optimizer": optimizer}[phase]
