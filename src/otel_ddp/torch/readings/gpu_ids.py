"""Finds the GPUs that a model is on, by the UUIDs and variables that the agent knows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from otel_ddp.errors import containment

# The variables that decide which GPUs a process sees, and in which order.
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")
_MOST = 64


def gpu_facts(
    devices: Iterable[torch.device],
    env: Mapping[str, str] = os.environ,
    properties: Callable[[torch.device], Any] = torch.cuda.get_device_properties,
) -> dict[str, Any]:
    """The facts that the agent finds the GPUs by; none where no device is CUDA's.

    Called when the model is on its devices: this starts nothing of CUDA.
    """
    found = sorted({each for each in devices if each.type == "cuda"}, key=str)[:_MOST]
    if not found:
        return {}

    def uuid(device: torch.device) -> str:
        # Older versions of torch do not know it: then the agent goes by the variables.
        return containment.attempt(lambda: str(properties(device).uuid), "")

    return {
        "boards": [{"index": each.index or 0, "uuid": uuid(each)} for each in found],
        "visible": {name: env[name] for name in _VARIABLES if name in env},
    }
