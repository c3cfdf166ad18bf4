"""Says on which boards a model lies, in words that the node's own tools understand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from otel_ddp import containment

# What decides which boards a process sees, and in which order.
_DECIDE = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")
_MOST = 64


def boards(
    devices: Iterable[torch.device],
    env: Mapping[str, str] = os.environ,
    properties: Callable[[torch.device], Any] = torch.cuda.get_device_properties,
) -> dict[str, Any]:
    """The facts that the agent finds the boards by; none where no device is CUDA's.

    Asked when the model has been moved: nothing of CUDA begins here that was not there.
    """
    found = sorted({each for each in devices if each.type == "cuda"}, key=str)[:_MOST]
    if not found:
        return {}

    def uuid(device: torch.device) -> str:
        # Older versions of torch do not tell: then the agent goes by the variables.
        return containment.attempt(lambda: str(properties(device).uuid), "")

    return {
        "boards": [{"index": each.index or 0, "uuid": uuid(each)} for each in found],
        "visible": {name: env[name] for name in _DECIDE if name in env},
    }
